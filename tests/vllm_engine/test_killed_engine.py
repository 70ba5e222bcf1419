"""A rank of an engine that dies while it samples ends the run in time, with a word that says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

from tests.e2e.commands import TREE, write_config
from tests.vllm_engine.test_run import SHAPE

LIMIT_S = 60


def test_a_rank_that_is_killed_while_its_engine_samples_ends_the_run(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        TREE,
        output=str(tmp_path / "run"),
        model={"dtype": "float32", "shape": SHAPE},
        parallel={"tensor": 2},
        # Nearly all of the time is spent sampling.
        rollout={"engine": "vllm", "prompts": 32, "samples": 16, "max_tokens": 40, "vllm": {"tensor": 2}},
        train={"steps": 1000, "minibatches": 2, "micro_batch_tokens": 8192},
        checkpoint={"every": 2},
        eval={"every": 0},
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "capo_megatron", "train", str(path), "--nproc", "2"]
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            assert launcher.poll() is None, launcher.stderr and launcher.stderr.read()
            time.sleep(0.2)
        ranks = psutil.Process(launcher.pid).children()
        family = psutil.Process(launcher.pid).children(recursive=True)
        ranks[-1].kill()
        killed = time.monotonic()
        _, said = launcher.communicate(timeout=LIMIT_S)
        assert time.monotonic() - killed < LIMIT_S
        assert launcher.returncode == 128 + signal.SIGKILL
        assert "was killed by SIGKILL" in said and "continues training from the newest checkpoint" in said
        assert not psutil.wait_procs(family, timeout=5)[1], "processes were left behind"
    finally:
        launcher.kill()
