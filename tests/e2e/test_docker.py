"""What is in docker/: linted, fitting together, and executed as far as it goes without docker, slurm and GPUs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from capo_megatron.cli import main

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
LAUNCHER = DOCKER / "launch_multinode.sh"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
INSTALL_S = 540.0


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A linter that the dev extra installs beside this Python."""
    path = Path(sys.executable).parent / name
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, timeout=60)


# --- Dockerfiles ------------------------------------------------------------------------------------------------------


@dataclass
class Stage:
    """What stands between one FROM and the next."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # an instruction and its text, without its flags

    def last(self, instruction: str) -> str:
        return [text for word, text in self.steps if word == instruction][-1]


def stages(name: str) -> list[Stage]:
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, text = line.split(maxsplit=1)
            if word == "FROM":
                base, _, stage = text.partition(" AS ")
                found.append(Stage(base, stage))
            else:
                found[-1].steps.append((word, text))
    return found


def copied(stage: Stage) -> list[list[str]]:
    """Sources and, last, the destination of each COPY from the build context."""
    return [text.split() for word, text in stage.steps if word == "COPY" and not text.startswith("--from=")]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    found = tool("hadolint", DOCKER / name)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_last_stage_runs_as_a_user_and_is_examined_by_doctor(name: str) -> None:
    last = stages(name)[-1]
    assert int(last.last("USER")) > 0
    assert last.last("HEALTHCHECK").endswith('CMD ["capo-megatron", "doctor"]')
    assert last.last("ENTRYPOINT") == '["capo-megatron"]'


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_exists_and_is_not_ignored(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored  # everything, but what has a line with "!"
    sources = [source for stage in stages(name) for *from_context, _ in copied(stage) for source in from_context]
    assert "capo_megatron" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{Path(source).parts[0]}" in ignored, source


def test_the_pins_of_the_gpu_image_are_what_the_package_accepts() -> None:
    lines = [line.partition("#")[0] for line in (DOCKER / "gpu.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    declared = [item for item in map(Requirement, texts) if item.name in versions]
    judged = [item for item in declared if not item.marker or item.marker.evaluate({"python_version": "3.12"})]
    assert {"torch", "megatron-core", "transformers", "math-verify", "vllm"} <= {item.name for item in judged}
    for item in judged:
        assert item.specifier.contains(versions[item.name]), item


# The steps that change a whole system; what they provide is there wherever the tests run.
SYSTEM = ("apt-get ", "useradd ")


class Image:
    """A folder in the place of an image's root, in which a Dockerfile's steps are executed."""

    def __init__(self, root: Path, python: Path) -> None:
        self.root, self.python = root, python
        self.environment: dict[str, str] = {}
        self.work = root
        self.system: list[str] = []

    def place(self, text: str) -> str:
        """The text with its absolute paths below the image's folders in this image's root."""
        return re.sub(r"(?<![\w.])/(opt|src|workspace)\b", lambda found: f"{self.root}{found[0]}", text)

    def build(self, name: str) -> Stage:
        """Execute all stages. Between two of them nothing is kept but what COPY --from takes."""
        for stage in stages(name):
            earlier = self.root.with_name("earlier")
            if self.root.exists():
                self.root.rename(earlier)
            self.root.mkdir()
            self.environment, self.work = self._fresh(), self.root
            for word, text in stage.steps:
                getattr(self, f"_{word.lower()}", lambda _: None)(text)
        return stage

    def output(self, command: Sequence[str] | str, timeout_s: float = 60.0) -> str:
        """What a command prints, which must succeed."""
        text = command if isinstance(command, str) else shlex.join(command)
        done = subprocess.run(
            ["/bin/sh", "-c", text],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _fresh(self) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        # Compiling all modules takes long, and changes nothing that is tested here.
        return known | {"PATH": f"{self.python.parent}:/usr/bin:/bin", "PIP_COMPILE": "0"}

    def _env(self, text: str) -> None:
        for item in shlex.split(text):
            name, _, value = item.partition("=")
            self.environment[name] = self.place(value).replace("$PATH", self.environment["PATH"])

    def _workdir(self, text: str) -> None:
        self.work = Path(self.place(text))
        self.work.mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        if text.startswith("--from=build "):
            source, target = text.split()[1:]
            assert source == target, "scripts of a virtual environment hold its path"
            Path(self.place(target)).parent.mkdir(parents=True, exist_ok=True)
            (self.root.with_name("earlier") / source.lstrip("/")).rename(self.place(target))
            return
        *sources, target = text.split()
        to = self.work / self.place(target)
        for source in sources:
            into = to / Path(source).name if target.endswith("/") else to
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / source, into)

    def _run(self, text: str) -> None:
        command = re.sub(r"--mount=\S+\s+", "", text).strip()
        if command.startswith(SYSTEM):
            self.system.append(command)
            return
        self.output(self.place(command), INSTALL_S)


@pytest.fixture(scope="module")
def python_3_11(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's Python, where pip can install something."""
    base = Path(getattr(sys, "_base_executable", sys.executable))
    found = base if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if found is None:
        pytest.skip("Dockerfile.cpu is of Python 3.11, which is not here")
    get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--retries", "0"]
    get += ["--timeout", "20", "--dest", str(tmp_path_factory.mktemp("reach")), "zss==1.2.0"]
    reached = subprocess.run(get, capture_output=True, text=True, timeout=120)
    if reached.returncode:
        pytest.skip(f"no package index in reach: {reached.stderr.strip().splitlines()[-1]}")
    return Path(found)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for an image; removed, as pytest would keep these gigabytes for three sessions."""
    yield tmp_path / "image"
    shutil.rmtree(tmp_path)


@pytest.mark.deploy
def test_the_steps_of_the_cpu_image_install_a_working_command(python_3_11: Path, root: Path) -> None:
    image = Image(root, python_3_11)
    last = image.build("Dockerfile.cpu")
    assert len(image.system) == 2, "a compiler and a user"
    assert "no known-bad combination" in image.output(json.loads(last.last("HEALTHCHECK").partition("CMD ")[2]))
    command = json.loads(last.last("ENTRYPOINT"))
    assert "doctor" in image.output([*command, *json.loads(last.last("CMD"))])
    assert "1 rank" in image.output([*command, "check", "examples/quickstart.yaml"])
    launcher = [LAUNCHER.name, "--no-docker", "--dry-run", "--nproc-per-node", "2", "train", "x.yaml"]
    assert image.output(launcher).endswith("-m capo_megatron train x.yaml\n")


# --- compose ----------------------------------------------------------------------------------------------------------


def validated(path: Path) -> subprocess.CompletedProcess[str]:
    return tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def test_compose_file_follows_the_schema_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    assert validated(DOCKER / "compose.yaml").returncode == 0
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("hostname: node1", "hostnam: node1"))
    found = validated(wrong)
    assert found.returncode == 1 and "hostnam" in found.stdout


def test_the_two_nodes_of_compose_start_one_run(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    tree = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    commands, seen = [], []
    for rank, (name, service) in enumerate(tree["services"].items()):
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        script, *options = service["entrypoint"]
        assert script == LAUNCHER.name and service["hostname"] == name
        command = launched("--dry-run", "--node-addr=10.0.0.1", "--interface=eth0", *options, *service["command"])
        assert f"is_host={'true' if rank == 0 else 'false'}" in argument(command, "--rdzv-conf")
        assert argument(command, "--rdzv-endpoint").partition(":")[0] == "node0"
        commands.append(command[command.index("capo_megatron") + 1 :])
        seen.append((argument(command, "--nnodes"), argument(command, "--nproc-per-node")))
        (volume,) = service["volumes"]
    assert commands[0] == commands[1] and seen == [("2", "2")] * 2
    verb, config, *overrides = commands[0]
    assert verb == "train" and overrides[-1].startswith(f"output={Path(volume.partition(':')[2]).name}/")
    monkeypatch.chdir(ROOT)
    assert main(["check", config, *overrides, "--ranks", "4"]) == 0
    assert "4 ranks" in capsys.readouterr().out


# --- launch_multinode.sh ----------------------------------------------------------------------------------------------


def start(*arguments: str, shell: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(
        [*shell, LAUNCHER, *arguments], capture_output=True, text=True, timeout=60, env=known, cwd=ROOT
    )


def launched(*arguments: str, **environment: str) -> list[str]:
    """The words of the command that the launcher would run."""
    done = start("--dry-run", *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return shlex.split(done.stdout)


def argument(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


NODES = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1")
PLACED = (*NODES, "--node-addr", "10.0.0.2", "--interface", "eth7")  # so that nothing is looked up
TRAIN = ("train", "run.yaml", "parallel.tensor=2", "data.task_options={max_ops: 2}", "--strange", "a'b")


def test_shellcheck_has_nothing_to_say() -> None:
    found = tool("shellcheck", LAUNCHER, DOCKER / "slurm.sbatch")
    assert (found.returncode, found.stdout) == (0, "")


def test_help_names_every_option() -> None:
    helped = start("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    options = set(re.findall(r"^ +(--[a-z-]+)(?: \| -h)?\)", LAUNCHER.read_text(), re.M)) - {"--"}
    assert len(options) > 15
    assert {option for option in options if option not in helped.stdout} == set()


def test_torchrun_gets_the_rendezvous_and_the_training_arguments_as_they_are() -> None:
    command = launched("--no-docker", *PLACED, "--nproc-per-node=4", "--run-id", "seven", "--wait", "60", *TRAIN)
    assert {"GLOO_SOCKET_IFNAME=eth7", "NCCL_SOCKET_IFNAME=eth7"} < set(command)
    assert command[command.index(sys.executable) : command.index("--nnodes")] == [
        *(sys.executable, "-m", "torch.distributed.run")
    ]
    got = {option: argument(command, option) for option in command if option.startswith("--") and option in OPTIONS}
    assert got == OPTIONS
    assert command[-len(TRAIN) - 2 :] == ["-m", "capo_megatron", *TRAIN]


OPTIONS = {
    "--nnodes": "2",
    "--nproc-per-node": "4",
    "--max-restarts": "0",
    "--rdzv-backend": "c10d",
    "--rdzv-endpoint": "10.0.0.1:29500",
    "--rdzv-id": "seven",
    "--local-addr": "10.0.0.2",
    "--rdzv-conf": "is_host=false,join_timeout=60,read_timeout=60",
}


def test_node_zero_hosts_the_rendezvous_and_static_counts_by_rank() -> None:
    command = launched("--no-docker", *PLACED, "--node-rank", "0", *TRAIN)
    assert argument(command, "--rdzv-conf").startswith("is_host=true,")
    command = launched("--no-docker", *PLACED, "--rendezvous", "static", "--master-port", "1234", *TRAIN)
    assert "--rdzv-backend" not in command
    assert [argument(command, f"--{name}") for name in ("node-rank", "master-addr", "master-port")] == [
        *("1", "10.0.0.1", "1234")
    ]


def test_interfaces_that_the_user_set_stay() -> None:
    command = launched("--no-docker", *PLACED, *TRAIN, NCCL_SOCKET_IFNAME="ib0")
    assert {"GLOO_SOCKET_IFNAME=eth7", "NCCL_SOCKET_IFNAME=ib0"} < set(command)


def test_one_node_needs_no_address() -> None:
    command = launched("--no-docker", "--nproc-per-node", "2", *TRAIN)
    assert "GLOO_SOCKET_IFNAME=lo" in command and argument(command, "--local-addr") == "127.0.0.1"


def test_docker_gets_what_nccl_and_infiniband_need(tmp_path: Path) -> None:
    environment = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "secret", "CUDA_HOME": "/usr/local/cuda"}
    command = launched(*PLACED, "--infiniband", "yes", "--mount", str(tmp_path), *TRAIN, **environment)
    text = shlex.join(command)
    for flags in (
        "docker run --rm --init",
        "--network host",
        "--ipc host",
        "--ulimit memlock=-1",
        "--ulimit stack=67108864",
        "--cap-add IPC_LOCK",
        "--device /dev/infiniband",
        "--gpus all",
        "--env NCCL_DEBUG",
        "--env WANDB_API_KEY",
        f"--user {os.getuid()}:{os.getgid()}",
        f"--volume {ROOT}:{ROOT}",
        f"--volume {tmp_path}:{tmp_path}",
        f"--workdir {ROOT}",
    ):
        assert f" {flags} " in f" {text} ", flags
    assert "secret" not in text and not {"INFO", "CUDA_HOME", "NCCL_IB_DISABLE=1"} & set(command)


def test_docker_runs_this_script_again_with_the_same_meaning() -> None:
    options = (*PLACED, "--rendezvous", "static", "--wait", "61", "--run-id", "seven", "--nproc-per-node", "3")
    outer = launched(*options, "--image", "other:1", *TRAIN)
    assert argument(outer, "--entrypoint") == LAUNCHER.name
    assert launched(*outer[outer.index("other:1") + 1 :]) == launched("--no-docker", *options, *TRAIN)


def test_docker_without_gpus_infiniband_or_the_hosts_shared_memory() -> None:
    command = launched(*NODES, "--gpus", "none", "--infiniband", "no", "--shm-size", "8g", *TRAIN)
    assert argument(command, "--shm-size") == "8g" and "NCCL_IB_DISABLE=1" in command
    assert not {"--gpus", "--ipc", "--device"} & set(command)


REFUSED = {
    "no command": ((), "no command. Give"),
    "no such option": (("--nodes", "2", "train"), "--nodes: no such option."),
    "no value": (("--nnodes",), "--nnodes: its value is missing."),
    "no number": (("--nnodes", "two", "train"), "--nnodes two: expected a whole number from 1"),
    "no node": (("--nnodes", "0", "train"), "--nnodes 0: expected a whole number from 1"),
    "rank": (("--nnodes", "2", "--node-rank", "2", "train"), "--node-rank 2: expected a whole number from 0 to 1."),
    "port": ((*NODES, "--master-port", "65536", "train"), "--master-port 65536: expected a whole number"),
    "ranks": ((*NODES, "--nproc-per-node", "-1", "train"), "--nproc-per-node -1: expected a whole number"),
    "address": (("--nnodes", "2", "train"), "--master-addr: missing, with --nnodes 2."),
    "kind": ((*NODES, "--rendezvous", "etcd", "train"), "--rendezvous etcd: expected one of: c10d static."),
    "when": ((*NODES, "--infiniband", "maybe", "train"), "--infiniband maybe: expected one of: yes no auto."),
    "folder": ((*NODES, "--mount", "models", "train"), "--mount models: expected the absolute path of a folder"),
    "loopback": (
        ("--no-docker", "--nnodes", "2", "--master-addr", "127.0.0.1", "train"),
        "--master-addr 127.0.0.1: only this node can reach that.",
    ),
    "unknown host": (
        ("--no-docker", "--nnodes", "2", "--master-addr", "no-host.invalid", "train"),
        "--master-addr no-host.invalid: no way there",
    ),
    "another node's address": (
        ("--no-docker", *NODES, "--node-addr", "192.0.2.77", "train"),
        "--node-addr 192.0.2.77: this node does not have it.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_in_one_line(case: str) -> None:
    arguments, message = REFUSED[case]
    done = start(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"launch_multinode.sh: {message}") and done.stderr.count("\n") == 1, done.stderr


def test_docker_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = start(*NODES, *TRAIN, shell=("/bin/bash",), PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch_multinode.sh: docker: not found.") and done.stderr.count("\n") == 1


# --- slurm.sbatch -----------------------------------------------------------------------------------------------------

# What slurm's commands do, for two nodes: their names, and one task on each.
SCONTROL = '#!/bin/sh\nprintf "%s\\n" rack-a rack-b\n'
SRUN = '#!/bin/sh\nshift\nfor node in 0 1; do SLURM_NODEID=$node "$@" || exit; done\n'


def submitted(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    copy = shutil.copy2(DOCKER / "slurm.sbatch", place / "slurm_script")
    environment = {
        **os.environ,
        "PATH": f"{place}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "rack-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
    }
    return subprocess.run([copy, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)


def test_slurm_starts_each_node_with_its_rank(tmp_path: Path) -> None:
    done = submitted(tmp_path, "--dry-run", "--image", "other:1", *TRAIN)
    assert (done.returncode, done.stderr) == (0, "")
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [argument(command, "--node-rank") for command in commands] == ["0", "1"]
    for command in commands:
        assert "other:1" in command and command[-len(TRAIN) :] == [*TRAIN]
        got = [argument(command, f"--{name}") for name in ("nnodes", "master-addr", "master-port", "rendezvous")]
        assert got == ["2", "rack-a", "23456", "static"]


def test_slurm_refuses_an_empty_command_before_any_node_starts(tmp_path: Path) -> None:
    done = submitted(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("slurm.sbatch: no command.") and done.stderr.count("\n") == 1
