"""Algorithms as the trainer meets them: advantages, masks, losses and weights of whole steps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from capo_megatron.algorithms import (
    ALGORITHMS,
    AlgorithmConfig,
    CapoConfig,
    CdeConfig,
    CodapoConfig,
    DapoConfig,
    DcpoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    ScapoConfig,
    SimkoConfig,
    SurrogateConfig,
    available,
    build,
)
from capo_megatron.algorithms.equations import capo_advantage, clipped_surrogate, grpo_advantage, kl_penalty
from capo_megatron.algorithms.noise_mask import ReferencePerplexityMask
from capo_megatron.errors import CapoError, CheckpointError, ConfigError, ShapeError
from capo_megatron.types import PolicyOutputs, RolloutBatch, Signals
from tests.family import advantages
from tests.golden.cases import CASES, assert_golden
from tests.rollouts import make_batch, signals, spread, train_batch


def per_row(value: Tensor) -> list[float]:
    return value.amax(dim=1).add(value.amin(dim=1)).tolist()  # rows are constant on the mask and 0 off it


def golden_batch(reference: list[float] | None = None) -> tuple[RolloutBatch, Signals]:
    case = CASES["capo_adv_variants"]["inputs"]
    batch = make_batch([3, 1, 2, 4, 2], case["reward"], [0] * 5)
    return batch, signals(case["lpm"], batch, reference or [-0.3] * 5)


def test_advantages_are_constant_over_a_response() -> None:
    batch, scored = golden_batch()
    for config in (CapoConfig(), GrpoConfig(), DrGrpoConfig(length=20), GspoConfig()):
        got = build(config).estimator(batch, scored)
        assert torch.equal(got, spread(per_row(got), batch))
        assert (got.abs() > 0).equal(batch.response_mask)


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (CapoConfig(tau=0), "algorithm.tau=0"),
        (CapoConfig(ref_high=0.9), "algorithm.ref_high=0.9"),
        (CapoConfig(ref_low=0), "algorithm.ref_low=0"),
        (CapoConfig(length=10), "algorithm.length=10: not used by reduction=seq-mean-token-mean"),
        (CapoConfig(reduction="constant-length"), "algorithm.length=null.*rollout.max_tokens"),
        (DrGrpoConfig(), "algorithm.length=null.*rollout.max_tokens"),
        (GrpoConfig(eps=-1), "algorithm.eps=-1"),
        (GrpoConfig(clip_high=-0.2), "algorithm.clip_high=-0.2"),
        (GrpoConfig(beta=-0.2), "algorithm.beta=-0.2"),
        (GrpoConfig(dual_clip=0.5), "algorithm.dual_clip=0.5"),
        (GrpoConfig(entropy_coef=math.nan), "algorithm.entropy_coef=nan"),
        (GrpoConfig(importance_cap=0), "algorithm.importance_cap=0"),
        (GrpoConfig(importance_level="sequence"), "algorithm.importance_level=sequence: nothing is weighed; set imp"),
        (GrpoConfig(importance_bound=1.0), "algorithm.importance_bound=1.0: must be larger than 1"),
        (GrpoConfig(reference_decay=1.0, mask="on"), "algorithm.reference_decay=1.0: must be from 0 to below 1"),
        (GrpoConfig(reference_decay=0.9), "algorithm.reference_decay=0.9: nothing reads the reference"),
        (CapoConfig(tau_schedule="linear"), "algorithm.tau_end=null: tau_schedule=linear needs"),
        (CapoConfig(tau_end=0.3), "algorithm.tau_end=0.3: not used by tau_schedule=constant"),
        (CapoConfig(tau_schedule="linear", tau_end=0.0), "algorithm.tau_end=0.0"),
        (CapoConfig(tau_until=0), "algorithm.tau_until=0"),
        (CapoConfig(weight_floor=1.5), "algorithm.weight_floor=1.5"),
        (CapoConfig(weight_floor=0.5, surrogate="linear"), "algorithm.weight_floor=0.5: not used by surrogate=linear"),
        (CapoConfig(mass_exponent=0.5), "algorithm.mass_exponent=0.5: not used by norm=sum"),
        (CapoConfig(norm="mass", mass_exponent=math.inf), "algorithm.mass_exponent=inf"),
        (GspoConfig(ratio="token"), "algorithm.ratio=token.*grpo"),
        (SimkoConfig(ratio="sequence"), "algorithm.ratio=sequence.*gspo"),
        (SimkoConfig(top_k=0), "algorithm.top_k=0"),
        (SimkoConfig(alpha=1.5), "algorithm.alpha=1.5"),
        (SimkoConfig(quantile=-0.1), "algorithm.quantile=-0.1"),
        (SimkoConfig(top1_penalty=-1), "algorithm.top1_penalty=-1"),
        (DapoConfig(overlong_buffer=4), "algorithm.max_length=null: overlong_buffer=4 needs it"),
        (DapoConfig(overlong_buffer=4, max_length=3), "algorithm.max_length=3"),
        (DapoConfig(max_refills=-1), "algorithm.max_refills=-1"),
        (CodapoConfig(percentile=75), "algorithm.percentile=75"),
        (CodapoConfig(repeat=0), "algorithm.repeat=0"),
        (CodapoConfig(offset=-0.1), "algorithm.offset=-0.1"),
        (CdeConfig(omega=-1), "algorithm.omega=-1"),
        (CdeConfig(kappa=0), "algorithm.kappa=0"),
        (CdeConfig(omega_until=0), "algorithm.omega_until=0"),
        (DcpoConfig(group_share=2), "algorithm.group_share=2"),
        (DcpoConfig(instruction="How sure are you?"), "algorithm.instruction='How sure are you.'.*CONFIDENCE:"),
        (ScapoConfig(credit=-1), "algorithm.credit=-1"),
        (ScapoConfig(credit_steps=-1), "algorithm.credit_steps=-1"),
    ],
)
def test_options_out_of_range_are_named(config: SurrogateConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(config)


# --- the loss -------------------------------------------------------------------------------------------------------


def golden_loss_inputs() -> tuple[Tensor, RolloutBatch, Signals, Tensor]:
    case = CASES["ppo_clip_loss_aggregations"]["inputs"]
    batch = make_batch([3, 4, 1], [1, 0, 1], [0, 0, 0])
    column = slice(1, 5)  # after a prompt of two tokens
    logp, old, adv = (torch.zeros(batch.response_mask.shape) for _ in range(3))
    logp[:, column], old[:, column] = torch.tensor(case["logp"]), torch.tensor(case["old_logp"])
    adv[:, column] = torch.tensor(case["advantage_seq"]).unsqueeze(1) * torch.tensor(case["mask"])
    return logp, batch, Signals(old), adv


def test_loss_reports_clipping_ratio_and_kl_per_token() -> None:
    case = CASES["ppo_clip_loss_aggregations"]
    logp, batch, scored, adv = golden_loss_inputs()
    algorithm = build(GrpoConfig(reduction="token-mean", dual_clip=3.0))
    token = algorithm.loss(PolicyOutputs(logp), train_batch(batch, scored, adv))
    weights, mask = algorithm.reduction(batch), batch.response_mask
    assert_golden((weights * token.loss).sum(), case["expected"]["token-mean"]["loss"], case)
    means = {name: value[mask].mean().item() for name, value in token.metrics.items()}
    assert means["clip_share"] == case["expected"]["token-mean"]["clip_fraction"]
    assert means["dual_clip_share"] == 1 / 8
    assert token.metrics["ratio_max"][mask].max().item() == pytest.approx(math.exp(1.5))
    gap = (logp - scored.old_logprobs)[mask]
    assert means["approx_kl"] == pytest.approx((gap.exp() - 1 - gap).mean().item(), rel=1e-5)
    assert "entropy" not in token.metrics
    assert not any(value.requires_grad for value in token.metrics.values())


def test_kl_and_entropy_terms_are_added_per_token() -> None:
    logp, batch, scored, adv = golden_loss_inputs()
    scored = Signals(scored.old_logprobs, scored.old_logprobs - 0.1)
    entropy = torch.rand(logp.shape)
    loss = build(GrpoConfig(beta=0.5, kl="k2", entropy_coef=0.25)).loss
    token = loss(PolicyOutputs(logp, entropy), train_batch(batch, scored, adv))
    plain = clipped_surrogate(logp, scored.old_logprobs, adv)
    torch.testing.assert_close(token.loss, plain + 0.5 * kl_penalty(logp, scored.ref_logprobs, "k2") - 0.25 * entropy)
    assert torch.equal(token.metrics["entropy"], entropy)
    with pytest.raises(ShapeError, match="entropy: None"):
        loss(PolicyOutputs(logp), train_batch(batch, scored, adv))
    with pytest.raises(ShapeError, match="ref_logprobs: None"):
        loss(PolicyOutputs(logp, entropy), train_batch(batch, Signals(scored.old_logprobs), adv))


# --- GRPO and Dr.GRPO -----------------------------------------------------------------------------------------------


def test_grpo_reads_the_named_reward_and_its_options() -> None:
    shaped = torch.tensor([0.5, -1.0, 2.0, 0.25])
    batch = make_batch([1, 2, 0, 1], [1, 0, 1, 0], [0, 0, 0, 1], extra={"shaped": shaped})
    scored = signals([-1.0] * 4, batch)
    got = build(GrpoConfig(reward="shaped", eps=1e-2)).estimator(batch, scored)
    want = grpo_advantage(shaped, batch.group, eps=1e-2)  # the empty response counts in the statistics
    assert per_row(got) == pytest.approx([*want[:2].tolist(), 0.0, 0.0])
    raw = build(GrpoConfig(reward="shaped", singleton="raw", scale_by_std=False)).estimator(batch, scored)
    assert per_row(raw)[3] == 0.25
    with pytest.raises(ConfigError, match=r"algorithm.reward='shape'.*\['correct', 'reward', 'shaped'\]"):
        build(GrpoConfig(reward="shape")).estimator(batch, scored)


def test_dr_grpo_divides_by_the_budget_and_not_by_the_batch_width() -> None:
    batch, scored = golden_batch()
    algorithm = build(DrGrpoConfig(length=100))
    assert per_row(algorithm.estimator(batch, scored)) == pytest.approx([0.6, -0.4, 0.6, -0.4, -0.4])
    weights = algorithm.reduction(batch)
    assert weights[batch.response_mask].tolist() == pytest.approx([1 / 500] * 12)


# --- CAPO -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", CASES["capo_adv_variants"]["expected"]["advantage"])
def test_capo_options_reach_the_equation(variant: str) -> None:
    case = CASES["capo_adv_variants"]
    norm, inv_tau = variant.split("|inv_tau=")
    batch, scored = golden_batch()
    got = build(CapoConfig(norm=norm, inv_tau=inv_tau == "True")).estimator(batch, scored)
    assert_golden(torch.tensor(per_row(got)), case["expected"]["advantage"][variant], case)


def test_capo_linear_surrogate_is_dr_grpo() -> None:
    batch, scored = golden_batch()
    linear = build(CapoConfig(surrogate="linear", norm="group")).estimator(batch, scored)
    torch.testing.assert_close(linear, build(DrGrpoConfig(length=9)).estimator(batch, scored))


def test_capo_output_scope_keeps_masked_answers_as_partners_and_pairs_scope_does_not() -> None:
    case = CASES["capo_token_level_with_mask"]
    batch = make_batch([4, 3, 4, 2], case["inputs"]["reward"], [0] * 4)
    reference = [-math.log(value) for value in case["expected"]["ppl_ref"]]
    scored = signals(case["expected"]["lpm_old"], batch, reference)
    for scope, name in (("output", "advantage_output_mask_only"), ("pairs", "advantage_masked_leave_pairs")):
        algorithm = build(CapoConfig(mask_scope=scope))
        assert_golden(torch.tensor(per_row(advantages(algorithm, batch, scored))), case["expected"][name], case)
        (mask,) = algorithm.masks
        assert mask(batch, scored).all(dim=1).tolist() == case["expected"]["keep"]
        assert mask(batch, scored).any(dim=1).tolist() == case["expected"]["keep"]
        assert algorithm.report() == {"mask/ref_high": 2.5, "mask/ref_low": 1.05}
    shared = build(CapoConfig(mask_scope="pairs", norm="group")).estimator(batch, scored)
    want = torch.tensor(case["expected"]["advantage_masked_leave_pairs"]) / 4  # G stays the group's size
    assert_golden(torch.tensor(per_row(shared)), want, case)
    assert build(CapoConfig(mask="off")).masks == ()
    assert build(CapoConfig(mask="off")).needs == frozenset()


def test_capo_pairs_scope_trains_nothing_where_a_class_is_masked_whole_but_output_scope_does() -> None:
    batch = make_batch([2, 2], [1, 0], [0, 0])
    scored = signals([-0.5, -0.4], batch, reference=[-3.0, -0.5])  # the only correct answer is implausible
    output = per_row(advantages(build(CapoConfig()), batch, scored))
    assert output[0] == 0 and output[1] < 0
    assert per_row(advantages(build(CapoConfig(mask_scope="pairs")), batch, scored)) == [0.0, 0.0]


def test_capo_leaves_empty_responses_out_of_the_pairs() -> None:
    batch = make_batch([2, 0, 3], [1, 0, 0], [0, 0, 0])
    scored = signals([-0.5, 0.0, -0.7], batch, [-0.4] * 3)
    want = capo_advantage(torch.tensor([-0.5, -0.7]), torch.tensor([1, 0]), torch.tensor([0, 0]))
    got = per_row(advantages(build(CapoConfig()), batch, scored))
    assert got == pytest.approx([want[0].item(), 0.0, want[1].item()])


def test_capo_can_rank_by_the_engines_log_probs() -> None:
    batch, scored = golden_batch()
    engine = [-0.9, -0.1, -0.2, -0.3, -0.8]
    batch = make_batch([3, 1, 2, 4, 2], [1, 0, 1, 0, 0], [0] * 5, sampler=spread(engine, batch))
    got = build(CapoConfig(logprob_source="engine")).estimator(batch, scored)
    want = build(CapoConfig()).estimator(batch, signals(engine, batch, [-0.3] * 5))
    assert torch.equal(got, want)


# --- the quartile mask ----------------------------------------------------------------------------------------------


def quartile_batch(correct: list[int], perplexity: list[float]) -> tuple[RolloutBatch, Signals]:
    batch = make_batch([2] * len(correct), correct, [0] * len(correct))
    return batch, signals([-0.5] * len(correct), batch, [-math.log(value) for value in perplexity])


def test_quartiles_are_estimated_once_frozen_and_survive_a_checkpoint_as_json() -> None:
    algorithm = build(CapoConfig(ref_high="quartile", ref_low="quartile"))
    assert algorithm.report() == {}
    batch, scored = quartile_batch([1, 1, 1, 1, 1, 0, 0, 0], [1.0, 2.0, 3.0, 4.0, 5.0, 1.5, 2.0, 3.0])
    (mask,) = algorithm.masks
    kept = mask(batch, scored).all(dim=1).tolist()
    assert algorithm.report() == pytest.approx({"mask/ref_high": 4.0, "mask/ref_low": 1.75})
    assert kept == [True, True, True, True, False, False, True, True]
    later, other = quartile_batch([1, 0], [4.5, 1.6])
    assert mask(later, other).any().item() is False
    resumed = build(CapoConfig(ref_high="quartile", ref_low="quartile"))
    resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    assert resumed.report() == algorithm.report()


def test_a_quartile_without_examples_waits_for_the_first_batch_that_has_some() -> None:
    mask = ReferencePerplexityMask("quartile", "quartile")
    only_wrong, scored = quartile_batch([0, 0, 0, 0], [1.1, 1.2, 1.3, 1.4])
    mask.rows(only_wrong, scored)
    assert mask.report() == pytest.approx({"mask/ref_low": 1.175})
    mixed, scored = quartile_batch([1, 1, 0], [50.0, 70.0, 1.0])
    assert mask.rows(mixed, scored).tolist() == [True, False, False]
    assert mask.report() == pytest.approx({"mask/ref_low": 1.175, "mask/ref_high": 65.0})


def test_quartiles_ignore_rows_that_do_not_count() -> None:
    mask = ReferencePerplexityMask("quartile", 1.05, truncated="drop")
    batch = make_batch([2, 2, 0, 2, 2], [1, 1, 1, 1, 1], [0] * 5, gradable=[1, 1, 1, 0, 1], truncated=[0, 0, 0, 0, 1])
    rows = mask.rows(batch, signals([-0.5] * 5, batch, [-1.0, -1.0, 0.0, -9.0, -9.0]))
    assert mask.report()["mask/ref_high"] == pytest.approx(math.e)
    assert rows.all()  # what does not count is not called masked either


def test_pairs_scope_and_output_mask_share_their_thresholds() -> None:
    algorithm = build(CapoConfig(ref_high="quartile", mask_scope="pairs"))
    batch, scored = quartile_batch([1, 1, 0], [2.0, 4.0, 2.0])
    algorithm.estimator(batch, scored)
    assert algorithm.report() == pytest.approx({"mask/ref_high": 3.5, "mask/ref_low": 1.05})


def test_configured_thresholds_win_over_saved_ones_and_nonsense_is_refused() -> None:
    mask = ReferencePerplexityMask(2.5, "quartile")
    mask.load_state_dict({"ref_high": 9.0, "ref_low": 1.2})
    assert mask.report() == {"mask/ref_high": 2.5, "mask/ref_low": 1.2}
    assert mask.state_dict() == {"ref_low": 1.2}
    for state in ({"ref_high": "x"}, {"ref_mid": 2.0}, {"ref_low": -1.0}):
        with pytest.raises(CheckpointError, match="reference_mask"):
            mask.load_state_dict(state)


def test_a_missing_reference_is_an_error() -> None:
    batch, _ = golden_batch()
    with pytest.raises(ShapeError, match="ref_logprobs: None"):
        ReferencePerplexityMask().rows(batch, signals([-0.5] * 5, batch))


# --- the table ------------------------------------------------------------------------------------------------------


def test_configs_are_told_apart_by_kind_and_unknown_keys_refused() -> None:
    adapter = TypeAdapter(AlgorithmConfig)
    for kind, (config, _) in ALGORITHMS.items():
        assert adapter.validate_python({"kind": kind}) == config()
        assert adapter.validate_python(adapter.dump_python(config())) == config()
    assert adapter.validate_python({"kind": "capo", "ref_high": "quartile", "tau": 1}) == CapoConfig(
        ref_high="quartile", tau=1.0
    )
    for bad in (
        {"kind": "cap"},
        {"kind": "capo", "taw": 1},
        {"kind": "capo", "ref_low": "half"},
        {"kind": "grpo", "tau": 1},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(bad)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a package with one algorithm, given its entry point's name and target."""

    def install(name: str, target: str) -> None:
        (tmp_path / "mean_only.py").write_text(
            "from dataclasses import dataclass\n"
            "from typing import Literal\n"
            "from capo_megatron.algorithms.grpo import GroupAdvantage\n"
            "from capo_megatron.algorithms.surrogate import SurrogateConfig, assemble\n"
            "@dataclass(frozen=True, kw_only=True)\n"
            "class Config(SurrogateConfig):\n"
            "    kind: Literal['mean_only'] = 'mean_only'\n"
            "def build(config): return assemble('mean_only', config, GroupAdvantage(scale_by_std=False))\n"
            "ALGORITHM = (Config, build)\n"
        )
        info = tmp_path / "mean_only-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mean-only\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[capo_megatron.algorithms]\n{name} = {target}\n")
        monkeypatch.delitem(sys.modules, "mean_only", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))  # also forgets what was known of installed packages

    return install


def test_an_installed_algorithm_is_found_by_its_entry_point(installed: Callable[[str, str], None]) -> None:
    installed("mean_only", "mean_only:ALGORITHM")
    config = TypeAdapter(AlgorithmConfig).validate_python({"kind": "mean_only", "beta": 0.1})
    batch, scored = golden_batch()
    want = build(DrGrpoConfig(length=9)).estimator(batch, scored)
    assert torch.equal(build(config).estimator(batch, scored), want)


@pytest.mark.parametrize(
    ("name", "target", "says"),
    [
        ("mean_only", "no_such_module:ALGORITHM", "cannot be loaded.*no_such_module"),
        ("mean_only", "mean_only:build", "cannot be loaded"),
        ("capo", "mean_only:ALGORITHM", "the kind is taken"),
    ],
)
def test_a_broken_entry_point_is_named(
    installed: Callable[[str, str], None], name: str, target: str, says: str
) -> None:
    installed(name, target)
    with pytest.raises(CapoError, match=says):
        available()
    assert build(CapoConfig()).name == "capo"  # built-in algorithms do not care
