"""Two "nodes" with a network between them, started as on a cluster, train what one node trains.

A node is a network namespace: an address of its own, a loopback of its own, and no other way to its neighbour than the
wire between them. Both see one file system, as the nodes of a cluster do.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from capo_megatron.cli import main
from capo_megatron.runlog import read_rows
from tests.parallel.launch import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.deploy]

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "docker" / "launch_multinode.sh"
STEPS, TRAIN_S = 3, 240.0
# float32 in another order of sums; Adam's eps keeps gradients of rounding size from deciding a step.
TOLERANCE = 1e-5
# A gradient's norm feels differences between weights more than the weights do.
COMPARED = {"train/loss": TOLERANCE, "reward/mean": TOLERANCE, "response/length": TOLERANCE, "train/grad_norm": 1e-4}
LAYOUTS = {
    "TP in the node, PP across": ("c10d", ["parallel.tensor=2", "parallel.pipeline=2"]),
    "TP in the node, DP across": ("static", ["parallel.tensor=2"]),
}
SMALL = [
    "rollout.prompts=4",
    "rollout.samples=6",
    f"train.steps={STEPS}",
    "train.eps=1e-4",
    f"checkpoint.every={STEPS}",
    "data.task_size=200",
    "data.task_options={max_ops: 2}",
    "data.validation_size=0",
    "eval.every=0",
    "warmup.steps=100",
    "log.samples=0",
]


@dataclass(frozen=True)
class Node:
    space: str
    address: str
    wire: str

    def sent(self) -> int:
        """Bytes that have left this node."""
        path = f"/sys/class/net/{self.wire}/statistics/tx_bytes"
        # sysfs shows the namespace in which it was mounted, which `ip netns exec` does anew.
        return int(ip("netns", "exec", self.space, "cat", path))


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    if shutil.which("ip") is None:
        pytest.skip("two nodes are network namespaces, made by `ip` of iproute2, which is not installed")
    two = [Node(f"capo-{os.getpid()}-{rank}", f"10.77.0.{rank + 1}", f"wire{rank}") for rank in range(2)]
    try:
        try:
            for node in two:
                ip("netns", "add", node.space)
            first, second = two
            ip("-n", first.space, "link", "add", first.wire, "type", "veth", "peer", second.wire, "netns", second.space)
            for node in two:
                ip("-n", node.space, "address", "add", f"{node.address}/24", "dev", node.wire)
                for interface in ("lo", node.wire):
                    ip("-n", node.space, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here (as root they can): {error.stderr.strip()}")
        yield two
    finally:
        for node in two:
            subprocess.run(["ip", "netns", "delete", node.space], capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `alone` of one rank, and with the base model from which all runs start."""
    folder = tmp_path_factory.mktemp("multinode")
    assert run_ranks(main, 1, arguments(folder, "alone", []), timeout_s=TRAIN_S) == [0]
    return folder


def arguments(place: Path, output: str, layout: list[str]) -> list[str]:
    where = [f"output={place / output}", f"warmup.path={place / 'base'}"]
    return ["train", str(ROOT / "examples" / "quickstart.yaml"), *SMALL, *layout, *where]


@contextmanager
def started(nodes: list[Node], per_node: int, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The launcher on every node at once."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = [str(LAUNCHER), "--no-docker", "--nnodes", str(len(nodes)), "--nproc-per-node", str(per_node)]
    launcher += ["--master-addr", nodes[0].address]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", node.space, *launcher, "--node-rank", str(rank), *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    try:
        yield processes
    finally:
        for node in nodes:  # ranks, too, whatever became of their launcher
            for pid in ip("netns", "pids", node.space).split():
                subprocess.run(["kill", "-KILL", pid], capture_output=True)
        for process in processes:
            process.communicate()


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Exit codes and what was said, by node."""
    said = [process.communicate(timeout=TRAIN_S)[0] for process in processes]
    return [process.returncode for process in processes], said


def assert_same(got: Path, want: Path) -> None:
    mine, theirs = read_rows(got / "metrics.jsonl"), read_rows(want / "metrics.jsonl")
    assert [row["step"] for row in mine] == [row["step"] for row in theirs] == list(range(1, STEPS + 1))
    for name, tolerance in COMPARED.items():
        for row, other in zip(mine, theirs, strict=True):
            close = math.isclose(row[name], other[name], rel_tol=tolerance, abs_tol=TOLERANCE)
            assert close, f"step {row['step']}, {name}: {row[name]} and {other[name]}"
    assert any(row["train/loss"] != 0 and row["train/grad_norm"] > 0 for row in mine), "nothing was trained"


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_nodes_train_what_one_node_and_one_rank_train(name: str, nodes: list[Node], place: Path) -> None:
    rendezvous, layout = LAYOUTS[name]
    assert run_ranks(main, 4, arguments(place, f"{name}, one node", layout), timeout_s=TRAIN_S) == [0] * 4
    before = [node.sent() for node in nodes]
    with started(nodes, 2, "--rendezvous", rendezvous, *arguments(place, name, layout)) as processes:
        codes, said = ended(processes)
    assert codes == [0, 0], said
    assert "step 1" in said[0] and "step 1" not in said[1], "rank 0 is on node 0"
    assert all(node.sent() - sent > 100_000 for node, sent in zip(nodes, before, strict=True)), "they had no need of it"
    assert_same(place / name, place / f"{name}, one node")
    assert_same(place / name, place / "alone")


def test_what_is_wrong_with_a_config_is_said_once_and_ends_both_nodes(nodes: list[Node], place: Path) -> None:
    with started(nodes, 1, *arguments(place, "refused", ["parallel.tensor=3"])) as processes:
        codes, said = ended(processes)
    assert 0 not in codes
    assert "".join(said).count("ConfigError: parallel.tensor=3") == 1, said
    assert not (place / "refused").exists()


def test_sigterm_to_one_node_saves_the_step_and_ends_both(nodes: list[Node], place: Path) -> None:
    endless = ["train.steps=100000", "checkpoint.every=0"]
    metrics, deadline = place / "stopped" / "metrics.jsonl", time.monotonic() + TRAIN_S
    with started(nodes, 1, *arguments(place, "stopped", endless)) as processes:
        while not metrics.is_file() or not read_rows(metrics):
            assert time.monotonic() < deadline and None in [process.poll() for process in processes]
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGTERM)
        codes, said = ended(processes)
    assert 0 not in codes, said
    last = read_rows(metrics)[-1]["step"]
    assert (place / "stopped" / "checkpoints" / "latest").read_text() == f"step_{last:06d}", said
