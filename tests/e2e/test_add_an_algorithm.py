"""`examples/add_an_algorithm.md`, followed word for word, adds an algorithm from outside the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDE = EXAMPLES / "add_an_algorithm.md"
SMALL = ["train.steps=2", "rollout.prompts=4", "rollout.samples=4", "eval.every=0", "data.validation_size=0"]


def files_of_the_guide() -> dict[str, str]:
    """Each file that the guide tells to write: a line with its name, then a fenced block."""
    return dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL))


def commands_of_the_guide() -> list[list[str]]:
    (block,) = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [line.split() for line in block.splitlines()]


def run(command: list[str], folder: Path, site: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(EXAMPLES.parent)])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guide_adds_an_algorithm(tmp_path: Path) -> None:
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    files = files_of_the_guide()
    assert set(files) == {"rloo.py", "pyproject.toml"}
    for name, text in files.items():
        (package / name).write_text(text)
    install, train = commands_of_the_guide()
    assert install[:2] == ["pip", "install"] and train[:2] == ["capo-megatron", "train"]
    # Into a folder of its own, so that the environment of the tests stays as it is.
    target = ["--target", str(site), "--no-build-isolation", "--quiet"]
    run([sys.executable, "-m", *install, *target], package, site)
    train = [str(EXAMPLES.parent / word) if word.endswith(".yaml") else word for word in train[1:]]
    run([sys.executable, "-m", "capo_megatron", *train, *SMALL, "warmup.steps=60"], tmp_path, site)
    (output,) = (word.removeprefix("output=") for word in train if word.startswith("output="))
    logged = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [1, 2] and all("rloo/baseline" in row for row in logged)
