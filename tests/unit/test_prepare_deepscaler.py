"""DeepScaleR's file becomes training and validation problems: the same ones each time, each once, each gradable."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "prepare_deepscaler.py"
ROWS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n), "solution": "", "difficulty": 1.0} for n in range(40)]
FAULTY = [
    {"problem": "What is  3 +\n3?", "answer": "6"},  # once more
    {"problem": "Twice?", "answer": "1"},
    {"problem": "Twice?", "answer": "2"},
    {"problem": "Unreadable?", "answer": "\\frac{"},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        columns = {name: [row[name] for row in rows] for name in ("problem", "answer")}
        pyarrow.parquet.write_table(pa.table(columns), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    return path


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The script with these arguments, in this process."""

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        code = runpy.run_path(str(SCRIPT))["main"]()
        return Done(code, *capsys.readouterr())

    return run


def problems(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(set(row) == {"problem", "answer"} for row in rows)
    return [(row["problem"], row["answer"]) for row in rows]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_each_problem_is_in_one_file_once_if_it_can_be_graded(suffix: str, tmp_path: Path, run: Run) -> None:
    source = written(tmp_path / f"rows.{suffix}", ROWS + FAULTY)
    done = run(source, tmp_path / "out", "--train", "30", "--validation", "10")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{len(ROWS + FAULTY)} problems read; left out before there were enough: 2 conflicting_duplicate, 1 duplicate"
        + (", 1 unreadable_answer" if "unreadable" in done.stdout else ""),
        f"10 in {tmp_path / 'out' / 'validation.jsonl'}",
        f"30 in {tmp_path / 'out' / 'train.jsonl'}",
    ]
    train, validation = problems(tmp_path / "out" / "train.jsonl"), problems(tmp_path / "out" / "validation.jsonl")
    assert (len(train), len(validation)) == (30, 10)
    assert set(train + validation) == {(row["problem"], row["answer"]) for row in ROWS}
    assert train != sorted(train), "shuffled"


def test_the_seed_alone_decides_which_problems_are_taken(tmp_path: Path, run: Run) -> None:
    source, taken = written(tmp_path / "rows.jsonl", ROWS), {}
    for name, seed in {"first": "0", "again": "0", "other": "1"}.items():
        assert run(source, tmp_path / name, "--train", "3", "--validation", "1", "--seed", seed).returncode == 0
        taken[name] = problems(tmp_path / name / "train.jsonl")
    assert taken["first"] == taken["again"] != taken["other"]


def test_what_is_left_out_is_counted_and_too_few_problems_are_refused(tmp_path: Path, run: Run) -> None:
    source = written(tmp_path / "rows.json", ROWS + FAULTY)
    done = run(source, tmp_path / "out", "--train", "41", "--validation", "0")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr == (
        f"prepare_deepscaler: DataError: {source}: has 40 usable problems of 44, 41 + 0 were asked for. "
        "Lower --train or --validation.\n"
    )


def test_nothing_is_overwritten(tmp_path: Path, run: Run) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    done = run(written(tmp_path / "rows.jsonl", ROWS), tmp_path, "--train", "1", "--validation", "1")
    assert done.returncode == 2 and "train.jsonl: is already there." in done.stderr
    assert (tmp_path / "train.jsonl").read_text() == "mine" and not (tmp_path / "validation.jsonl").exists()


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, run: Run) -> None:
    done = run(tmp_path / "none.json", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no such file" in done.stderr
