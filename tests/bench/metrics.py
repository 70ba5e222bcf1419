"""Time and memory of `capo-megatron metrics` on a million records, and AUC-mean against a loop over scikit-learn.

    python -m pip install -e '.[bench]'
    python tests/bench/metrics.py [--questions 62500] [--samples 16] [--auc-questions 5000]

Records are written to a temporary folder (0.6 GB) and measured by a process of its own, as a user would: imports,
reading, every metric at every N, no bootstrap. scikit-learn's `roc_auc_score` is timed on the first `auc-questions`
mixed questions, ours on the same ones and on all. Goals: 10 s on a quiet machine, 2 GB, and a ratio of 20.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from capo_megatron.evaluation.calibration import auc_mean

TEXT = "We add the numbers one after the other and check every sum before the next one is written down. " * 3
LINE = (
    '{{"question": "q{q}", "benchmark": "bench", "sample": {s}, "prompt": "What is {q} plus one?", '
    '"response": "{text}{s} of {q}", "extracted": "{answer}", "answer": "0", "correct": {correct}, '
    '"verdict": "{verdict}", "tokens": {tokens}, "logprob_sum": {total:.6f}, "truncated": false, '
    '"model": "model", "step": 0, "schema": 2}}\n'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=62_500)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--auc-questions", type=int, default=5_000)
    options = parser.parse_args()
    mean, correct, question = draw(options.questions, options.samples)
    against_sklearn(mean, correct, question, options.auc_questions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        write(path, mean, correct, question, options.samples)
        measure(path, len(mean))


def draw(questions: int, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean log-prob, correct, question) of every response; confidence tells right from wrong a little."""
    random = np.random.default_rng(0)
    rows = questions * samples
    correct = random.random(rows) < np.repeat(random.beta(1.5, 1.0, questions), samples)
    mean = np.round(-random.gamma(2.0, np.where(correct, 0.08, 0.12)), 6)
    return mean, correct, np.repeat(np.arange(questions), samples)


def write(path: Path, mean: np.ndarray, correct: np.ndarray, question: np.ndarray, samples: int) -> None:
    random = np.random.default_rng(1)
    tokens, wrong = random.integers(50, 2000, len(mean)), random.integers(1, 6, len(mean))
    with path.open("w") as file:
        for row in range(len(mean)):
            right = bool(correct[row])
            file.write(
                LINE.format(
                    q=question[row],
                    s=row % samples,
                    text=TEXT,
                    answer=0 if right else wrong[row],
                    correct="true" if right else "false",
                    verdict="correct" if right else "wrong",
                    tokens=tokens[row],
                    total=mean[row] * tokens[row],
                )
            )


def against_sklearn(mean: np.ndarray, correct: np.ndarray, question: np.ndarray, most: int) -> None:
    first = question < most
    start = time.process_time()
    ours = auc_mean(mean[first], correct[first], question[first])
    own = time.process_time() - start
    rows = np.split(np.flatnonzero(first), np.flatnonzero(np.diff(question[first])) + 1)
    start = time.process_time()
    theirs = [roc_auc_score(correct[part], mean[part]) for part in rows if 0 < correct[part].sum() < len(part)]
    loop = time.process_time() - start
    start = time.process_time()
    whole = auc_mean(mean, correct, question)
    everything = time.process_time() - start
    assert abs(ours.value - np.mean(theirs)) < 1e-12 and ours.n_valid == len(theirs)
    print(f"AUC-mean of {most:,} questions: scikit-learn {loop:.2f} s, ours {own:.3f} s, ratio {loop / own:.0f}")
    print(f"AUC-mean of all {len(whole.per_question):,} questions: {everything:.2f} s, {whole.value:.4f}")


def measure(path: Path, rows: int) -> None:
    command = [sys.executable, "-m", "capo_megatron", "metrics", str(path), "--format", "csv"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    wall = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"all metrics of {rows:,} records, {path.stat().st_size / 1e9:.2f} GB: {wall:.1f} s by the clock, "
        f"{used.ru_utime + used.ru_stime:.1f} s of processor time, {used.ru_maxrss / 1e6:.2f} GB"
    )


if __name__ == "__main__":
    main()
