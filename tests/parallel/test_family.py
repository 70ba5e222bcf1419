"""Every algorithm trains the laptop task on TP2 x PP2 as on one rank, and resumes with whatever it remembers.

FAMILY_STEPS=20 makes the runs longer than the everyday ones.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from capo_megatron.algorithms import ALGORITHMS
from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.parallel

STEPS = int(os.environ.get("FAMILY_STEPS", "4"))  # even
HALF = STEPS // 2
CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
# float32 on two layouts: sums in another order. Some steps of Adam, whose eps is large enough here that gradients of
# rounding size do not decide the direction of a step, carry that on.
TOLERANCE = 1e-5
# A gradient's norm feels differences between weights more than the weights do, most of all near GSPO's narrow clips.
COMPARED = {
    "train/loss": TOLERANCE,
    "train/grad_norm": 1e-4,
    "advantage/abs_mean": TOLERANCE,
    "reward/mean": TOLERANCE,
    "response/length": TOLERANCE,
}

SMALL = [
    "rollout.prompts=4",
    "rollout.samples=6",
    f"train.steps={STEPS}",
    "train.eps=1e-4",
    f"checkpoint.every={HALF}",
    "checkpoint.keep=9",
    "data.task_size=200",
    "data.task_options={max_ops: 2}",
    "data.validation_size=0",
    "eval.every=0",
    "warmup.steps=200",
    "log.console=off",
    "log.samples=0",
]
OPTIONS = {
    "capo": ["algorithm.ref_high=quartile", "algorithm.ref_low=quartile"],
    "grpo": ["algorithm.beta=0.01", "algorithm.entropy_coef=0.001", "algorithm.importance_cap=2.0"],
    # The penalty goes into the reward where nothing divides by its deviation, see `shaping.with_penalty`.
    "dr_grpo": ["algorithm.length=8", "algorithm.beta=0.01", "algorithm.kl_in=reward"],
    "dapo": ["algorithm.overlong_buffer=6", "algorithm.max_length=8"],
    "gspo": ["algorithm.reduction=seq-mean-token-mean"],
    "cde": ["algorithm.omega_schedule=linear", "algorithm.omega_until=0.5"],
    "simko": ["algorithm.alpha=0.3", "algorithm.quantile=0.5"],
    "scapo": ["algorithm.credit=0.2", f"algorithm.credit_steps={STEPS}", "data.perturbations=[typo, typo]"],
}
# What makes a run of the family more than an algorithm's defaults.
VARIANTS = {
    "capo_averaged_reference": (
        "capo",
        ["algorithm.reference_decay=0.8", "algorithm.tau_schedule=cosine", "algorithm.tau_end=0.3"],
    ),
    "capo_sequence_ratio": ("capo", ["algorithm.ratio=sequence", "algorithm.norm=mass", "algorithm.weight_floor=0.2"]),
}
RUNS = {name: (name, OPTIONS.get(name, [])) for name in ALGORITHMS} | VARIANTS
# The number that tells whether an algorithm does its work, and at which steps it must have what value.
TELLING = {
    "dapo": ("dapo/overlong_share", lambda values: max(values) > 0),
    "codapo": ("codapo/refocused", lambda values: values == [0.0, 1.0] * (STEPS // 2)),
    "cde": ("cde/omega", lambda values: values[0] == 1.0 and values[HALF] == 0.0 and values[2] < values[1]),
    "simko": ("train/selected_share", lambda values: min(values) > 0 and max(values) < 1),
    "dcpo": ("dcpo/stated", lambda values: set(values) == {0.0}),
    "scapo": ("scapo/lambda", lambda values: values == [0.2] * HALF + [0.0] * HALF),
    "capo": ("mask/ref_high", lambda values: len(set(values[-3:])) == 1),
    "capo_averaged_reference": ("capo/tau", lambda values: values[0] == 0.4 and values == sorted(values, reverse=True)),
}


def arguments(folder: Path, name: str, output: str) -> list[str]:
    kind, options = RUNS[name]
    return [f"algorithm.kind={kind}", *SMALL, *options, f"output={folder / output}", f"warmup.path={folder / 'base'}"]


def train(folder: str, layout: list[str], suffix: str) -> None:
    """One run after the other on the same ranks: to start them takes longer than to train."""
    from capo_megatron import assemble
    from capo_megatron.config import load
    from capo_megatron.mcore import runtime
    from capo_megatron.rewards import build_reward

    configs = [load(CONFIG, arguments(Path(folder), name, f"{name}{suffix}") + layout) for name in RUNS]
    ranks = runtime.start(configs[0].parallel, configs[0].seed)
    for config in configs:
        reward = build_reward(config.reward)
        accepted = assemble.accept(config, ranks.size)
        assert assemble.train_on(ranks, config, accepted, reward, lambda _: None) == STEPS
    ranks.stop()


def final_weights(folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    from capo_megatron.config import load
    from capo_megatron.mcore import runtime
    from capo_megatron.mcore.checkpoint import DistCheckpointStore
    from capo_megatron.model import Model

    found = {}
    config = load(CONFIG, arguments(Path(folder), "capo", "none"))
    model, ranks = Model.accept(config), runtime.start(config.parallel, config.seed)
    policy = model.policy(ranks, model.weights(ranks, lambda _: None), 1)
    for name in names:
        assert DistCheckpointStore(Path(folder) / name, ranks).load(policy) is not None
        found[name] = {weight: tensor.numpy().copy() for weight, tensor in policy.hf_weights()}
    ranks.stop()
    return found


def back_to_half(whole: Path, copy: Path) -> None:
    """An output as it was when a kill ended the run after the checkpoint in its middle."""
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "checkpoints" / f"step_{STEPS:06d}")
    (copy / "checkpoints" / "latest").write_text(f"step_{HALF:06d}")


def rows(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs <name> of one rank, <name>-split of TP2 x PP2 and <name>-resumed of one rank that was interrupted."""
    folder = tmp_path_factory.mktemp("family")
    run_ranks(train, 1, str(folder), [], "", timeout_s=500)
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "checkpoint.every=0"]
    run_ranks(train, 4, str(folder), layout, "-split", timeout_s=800)
    for name in RUNS:
        back_to_half(folder / name, folder / f"{name}-resumed")
    run_ranks(train, 1, str(folder), [], "-resumed", timeout_s=500)
    return folder


@pytest.fixture(scope="module")
def weights(outputs: Path) -> dict[str, dict[str, Any]]:
    names = [name + suffix for name in RUNS for suffix in ("", "-split", "-resumed")]
    return run_ranks(final_weights, 1, str(outputs), names, timeout_s=300)[0]


@pytest.mark.parametrize("suffix", ["-split", "-resumed"])
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_do_not_depend_on_layout_or_interruption(
    name: str, suffix: str, outputs: Path, weights: dict[str, dict[str, Any]]
) -> None:
    alone, other = rows(outputs / name), rows(outputs / f"{name}{suffix}")
    assert [row["step"] for row in alone] == [row["step"] for row in other] == list(range(1, STEPS + 1))
    for metric, tolerance in COMPARED.items():
        for mine, theirs in zip(alone, other, strict=True):
            if metric in mine or metric in theirs:
                close = math.isclose(mine[metric], theirs[metric], rel_tol=tolerance, abs_tol=TOLERANCE)
                assert close, f"step {mine['step']}, {metric}: {mine[metric]} and {theirs[metric]}"
    for weight, value in weights[name].items():
        torch.testing.assert_close(
            torch.from_numpy(weights[name + suffix][weight]), torch.from_numpy(value), rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("name", RUNS)
def test_training_moves_the_weights_and_logs_what_tells_whether_it_works(name: str, outputs: Path) -> None:
    logged = rows(outputs / name)
    assert any(row["advantage/abs_mean"] > 0 for row in logged)
    assert all(math.isfinite(value) for row in logged for value in row.values() if isinstance(value, float))
    if name in TELLING:
        metric, holds = TELLING[name]
        assert holds([row[metric] for row in logged if metric in row]), [row.get(metric) for row in logged]
