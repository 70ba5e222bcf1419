"""Two ranks grade a thousand answers each, of which five hang for ever and five exhaust the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TIMEOUT_S = 3.0
MEMORY_MIB = 256
# Ten bad answers shared by two processes take 15 s. The rest is start-up and grading, on cores shared with other tests.
LIMIT_S = 240.0
# A rank holds torch (0.3 GiB here); its two grading processes and their spare hold at most their limit.
LIMIT_RSS_MIB = 2 * (1024 + 3 * MEMORY_MIB)

SCRIPT = r"""
import json, sys, threading, time
import torch.distributed as dist
from capo_megatron.config import RewardConfig
from capo_megatron.rewards import build_reward
from capo_megatron.types import Problem

def main(folder, timeout_s, memory_mib):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reward = build_reward(RewardConfig(timeout_s=timeout_s, memory_mib=memory_mib))
    problems = [Problem(f"p{index // 8}", "", (), str(index // 8)) for index in range(1000)]
    answers = [str(index // 8 + index % 2) for index in range(1000)]
    for index in range(5):
        # Integer arithmetic that runs for ages in C; and a binomial with a hundred million terms.
        answers[100 * index] = rf"5^{{\left(5^{{\left(5^{{\left(5^5\right)}}\right)}} - 4\right)}} - {index + 5}"
        answers[100 * index + 50] = rf"(x+y)^{{{10**8 + index}}}"
    start = time.monotonic()
    grades = reward.grade(problems, [f"hence \\boxed{{{answer}}}" for answer in answers])
    seconds = time.monotonic() - start
    dist.barrier()  # the communication threads are alive and well
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({"seconds": seconds, "verdicts": [grade.verdict.value for grade in grades]}, file)
    reward.close()
    dist.destroy_process_group()

if __name__ == "__main__":
    thread = threading.Thread(target=main, args=(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
    thread.start()  # off the main thread, where signals cannot be used
    thread.join()
"""


def tree(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rss_mib(processes: list[psutil.Process]) -> float:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


@pytest.mark.parallel
def test_exactly_the_bad_answers_time_out_in_bounded_time_and_memory(tmp_path: Path) -> None:
    script = tmp_path / "grade.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    started = time.monotonic()
    peak, seen = 0.0, set()
    with subprocess.Popen(
        [*command, str(tmp_path), str(TIMEOUT_S), str(MEMORY_MIB)], env={**os.environ, "PYTHONPATH": path}
    ) as run:
        while run.poll() is None and time.monotonic() - started < LIMIT_S:
            processes = tree(run.pid)
            seen.update(processes)
            peak = max(peak, rss_mib(processes))
            time.sleep(0.25)
        run.kill()
    assert run.returncode == 0, f"still running after {LIMIT_S} s" if run.returncode < 0 else "a rank failed"
    bad = {index for index in range(500) if index % 50 == 0}
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = ["timeout" if index in bad else "wrong" if index % 2 else "correct" for index in range(1000)]
        assert report["verdicts"] == expected
        print(f"rank {rank}: {report['seconds']:.1f} s")
    print(f"peak memory of all processes: {peak:.0f} MiB")
    assert peak < LIMIT_RSS_MIB
    assert not [process for process in seen if process.is_running()]
