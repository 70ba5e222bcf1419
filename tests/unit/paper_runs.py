"""Small synthetic runs: folders as training and evaluation leave them, whose numbers are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from capo_megatron.evaluation.records import write_records
from capo_megatron.runlog import to_json
from capo_megatron.types import EvalRecord

STEPS = (0, 10, 20, 30, 40)


def write_run(
    folder: Path,
    kind: str = "capo",
    seed: int = 0,
    accuracy: float = 0.8,
    auc: float = 0.7,
    benchmarks: Sequence[str] = ("aime",),
    options: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    noise: float = 0.0,
) -> Path:
    """A run that ends at this accuracy and AUC-mean (from 0.6 and 0.8), and evaluations of it and of its base."""
    config = {
        "output": str(folder),
        "seed": seed,
        "model": {"path": "base"},
        "data": dict(data or {}),
        "algorithm": {"kind": kind, **(options or {})},
        "train": {"steps": STEPS[-1]},
    }
    (folder / "eval").mkdir(parents=True)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(config))
    draw = np.random.default_rng([seed, *folder.name.encode()])
    shift = noise * draw.normal(size=(2, len(STEPS)))
    rows = [validation(step, accuracy, auc, shift[:, index]) for index, step in enumerate(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))
    end = shift[:, -1]
    trained = [
        one
        for at, name in enumerate(benchmarks)
        for one in records(name, accuracy + end[0] - 0.15 * at, auc + end[1] + 0.03 * at, kind, STEPS[-1], draw)
    ]
    write_records(folder / "eval" / f"step_{STEPS[-1]:06d}.jsonl", trained)
    same = np.random.default_rng(seed)  # the base is the same for all runs of a seed
    base = [one for at, name in enumerate(benchmarks) for one in records(name, 0.6 - 0.15 * at, 0.8, "base", 0, same)]
    write_records(folder / "eval" / "base.jsonl", base)
    return folder


def validation(step: int, accuracy: float, auc: float, shift: Sequence[float] = (0.0, 0.0)) -> dict[str, float]:
    """A row of metrics.jsonl."""
    done = 1 - (1 - step / STEPS[-1]) ** 2
    return {
        "step": step,
        "policy/entropy": 0.4 - 0.3 * (accuracy - 0.5) * done,
        "validation/accuracy": 0.6 + (accuracy - 0.6) * done + shift[0],
        "validation/accuracy_se": 0.01,
        "validation/auc_mean": 0.8 + (auc - 0.8) * done + shift[1],
        "validation/auc_mean_se": 0.02,
        "validation/auc_questions": 100 - 60 * done,
        "validation/auc_pooled": 0.85,
    }


def records(
    benchmark: str, accuracy: float, auc: float, model: str, step: int, draw: np.random.Generator, questions: int = 30
) -> list[EvalRecord]:
    """Eight samples per question, about so accurate, whose mean log-probs have about this AUC."""
    found = []
    for question in range(questions):
        chance = np.clip(accuracy + draw.normal(0, 0.25), 0, 1)
        for sample in range(8):
            right = bool(draw.random() < chance)
            mean = -abs(draw.normal(0, 1) + (1.2 if right else 1.2 + 3.5 * (auc - 0.5)))
            found.append(
                EvalRecord(
                    question=f"q{question}",
                    benchmark=benchmark,
                    sample=sample,
                    prompt="?",
                    response=f"{question} {sample}",
                    extracted="1" if right else str(draw.integers(2, 5)),
                    answer="1",
                    correct=right,
                    verdict="correct" if right else "wrong",
                    tokens=4,
                    logprob_sum=4 * float(mean),
                    truncated=False,
                    model=model,
                    step=step,
                )
            )
    return found
