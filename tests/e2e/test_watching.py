"""What a run shows of itself every step, by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from capo_megatron.cli import main
from capo_megatron.runlog import read_rows
from tests.e2e.commands import TREE, write_config

EVERY_STEP = [
    *("reward/mean", "reward/accuracy"),
    *("verdict/correct", "verdict/wrong", "verdict/unparseable", "verdict/timeout"),
    *("response/length", "response/truncated"),
    *("calibration/auc_mean", "calibration/logprob_correct", "calibration/logprob_wrong"),
    *(f"reference/ppl_{kind}_{quantile}" for kind in ("correct", "wrong") for quantile in ("q25", "q50", "q75")),
    *("mask/dropped_correct", "mask/dropped_wrong", "advantage/abs_mean"),
    *("policy/entropy", "train/clip_share", "train/ratio_max", "train/approx_kl", "train/grad_norm", "train/lr"),
    *("engine/gap_median", "engine/above_2", "refit/gap_median"),
    *(f"{kind}/{phase}" for kind in ("seconds", "tokens_per_second") for phase in ("rollout", "reward", "score")),
    *(f"{kind}/{phase}" for kind in ("seconds", "tokens_per_second") for phase in ("train", "refit", "step")),
]
WHEN_VALIDATED = [
    *(f"validation/{name}" for name in ("accuracy", "pass_at_n", "auc_mean", "auc_questions")),
    *("seconds/eval", "tokens_per_second/eval"),
]


def test_every_step_logs_what_is_worth_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text("def even(problem, response):\n    return sum(map(str.isdigit, response)) % 2 == 0\n")
    write_config(
        tmp_path,
        data=TREE["data"] | {"validation_size": 8},
        reward={"kind": "reward.py:even", "workers": 1},
        rollout=TREE["rollout"] | {"samples": 8},
        train=TREE["train"] | {"steps": 3},
        eval={"every": 3, "samples": 8},
        log={"console": "plain", "samples": 5},
    )
    assert main(["train", "run.yaml"]) == 0
    rows = read_rows(Path("run/metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        for name in EVERY_STEP:
            assert isinstance(row[name], float) and math.isfinite(row[name]), f"step {row['step']}: {name}"
        parts = sum(row[f"seconds/{phase}"] for phase in ("rollout", "score", "train", "refit"))
        assert parts <= row["seconds/step"] + 1e-3
        assert row["seconds/reward"] <= row["seconds/rollout"]
    for row in (rows[0], rows[3]):
        for name in WHEN_VALIDATED:
            assert isinstance(row[name], float) and math.isfinite(row[name]), f"step {row['step']}: {name}"
    lines = Path("run/samples/step_000002.jsonl").read_text().splitlines()
    # The response on which engine and policy agree least comes beside the five.
    assert (
        5 <= len(lines) <= 6 and {"prompt", "response", "verdict", "reward", "advantage"} <= json.loads(lines[0]).keys()
    )
