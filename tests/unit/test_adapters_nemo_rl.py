"""CAPO in NeMo-RL, against the signatures of NVIDIA-NeMo/RL at the commit that the adapter names.

NeMo-RL is not a package that could be installed here: its calls, enums and defaults are recorded below.
"""

import enum
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from capo_megatron.adapters import MissingTrainerError, nemo_rl
from capo_megatron.algorithms.equations import (
    capo_advantage,
    capo_noise_mask,
    clipped_surrogate,
    kl_penalty,
    reduction_weights,
    sequence_logprob_mean,
)
from capo_megatron.errors import ConfigError, ShapeError

# The keywords of `adv_estimator.compute_advantage(...)` in nemo_rl/algorithms/grpo.py (grpo_train, async_grpo_train).
SYNC = ("prompt_ids", "rewards", "mask", "repeated_batch", "logprobs_policy", "logprobs_reference")
ASYNC = (*SYNC, "teacher_logprobs", "prev_logprobs", "generation_logprobs", "sample_mask")
# Of `self.loss_fn(...)` in nemo_rl/algorithms/loss/wrapper.py, with what prepare_loss_input makes for LOGPROB.
LOSS_CALL = ("data", "global_valid_seqs", "global_valid_toks", "next_token_logprobs")

LOSS = {"reference_policy_kl_penalty": 1e-9, "force_on_policy_ratio": False}


def batch(rows=12, width=7, prompt=3):
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, width - prompt + 1, (rows,), generator=random)
    column = torch.arange(width)
    mask = ((column >= prompt) & (column < prompt + lengths[:, None])).float()
    return {
        "prompt_ids": torch.arange(rows // 4).repeat(4)[:, None].expand(-1, prompt),  # groups are not adjacent
        "rewards": torch.randint(0, 2, (rows,), generator=random).float(),
        "mask": mask,
        "policy": -torch.rand(rows, width, generator=random),
        "reference": -2 * torch.rand(rows, width, generator=random),
    }


def test_advantages_come_from_the_keywords_that_nemo_rl_passes():
    rows = batch()
    estimator = nemo_rl.CapoAdvantageEstimator(
        {"name": "capo", "normalize_rewards": True, "tau": 0.4, "ref_high": 2.0, "ref_low": 2.0}, LOSS
    )
    for names in (SYNC, ASYNC):
        inspect.signature(estimator.compute_advantage).bind(**dict.fromkeys(names))
    found = estimator.compute_advantage(
        prompt_ids=rows["prompt_ids"],
        rewards=rows["rewards"],
        mask=rows["mask"],
        repeated_batch={},
        logprobs_policy=rows["policy"],
        logprobs_reference=rows["reference"],
    )
    own, reference = (sequence_logprob_mean(rows[name], rows["mask"])[0] for name in ("policy", "reference"))
    keep = capo_noise_mask(reference, rows["rewards"], 2.0, 2.0)
    expected = capo_advantage(own, rows["rewards"], rows["prompt_ids"][:, 0], 0.4) * keep
    assert 0 < keep.sum() < len(keep)
    torch.testing.assert_close(found, expected[:, None] * rows["mask"], rtol=0, atol=1e-6)
    assert estimator.last_metrics["capo/kept"] == pytest.approx(keep.float().mean().item())


def test_settings_with_which_nemo_rl_hands_over_zeros_are_refused():
    for loss, setting in (
        ({**LOSS, "force_on_policy_ratio": True}, "force_on_policy_ratio"),
        ({**LOSS, "reference_policy_kl_penalty": 0.0}, "reference_policy_kl_penalty"),
    ):
        with pytest.raises(ConfigError, match=setting):
            nemo_rl.CapoAdvantageEstimator({"name": "capo"}, loss)
    nemo_rl.CapoAdvantageEstimator({"name": "capo", "mask": "off"}, {"reference_policy_kl_penalty": 0.0})
    with pytest.raises(ConfigError, match=r"grpo\.adv_estimator: unknown option 'temperature'"):
        nemo_rl.CapoAdvantageEstimator({"name": "capo", "temperature": 1.0}, LOSS)


@pytest.mark.parametrize(("change", "said"), [({"logprobs_policy": None}, "not handed over"), ({}, "all zero")])
def test_missing_or_zero_logprobs_are_an_error(change, said):
    rows = batch()
    given = {"logprobs_policy": rows["policy"], "logprobs_reference": torch.zeros_like(rows["policy"]), **change}
    estimator = nemo_rl.CapoAdvantageEstimator({"name": "capo"}, LOSS)
    with pytest.raises(ShapeError, match=said):
        estimator.compute_advantage(rows["prompt_ids"], rows["rewards"], rows["mask"], **given)


class Interfaces(ModuleType):
    """The names that nemo_rl/algorithms/loss/interfaces.py has."""

    class LossType(enum.Enum):
        TOKEN_LEVEL = "token_level"
        SEQUENCE_LEVEL = "sequence_level"

    class MetricNormalizer(enum.Enum):
        TOKENS = "tokens"
        SEQUENCES = "sequences"
        NONE = "none"

    class LossInputType(enum.Enum):
        LOGIT = "logit"
        LOGPROB = "logprob"


@pytest.fixture
def recorded(monkeypatch):
    """NeMo-RL's module names, holding what the adapter touches."""
    grpo, sync = (ModuleType(f"nemo_rl.algorithms.{name}") for name in ("grpo", "grpo_sync"))
    modules = {"nemo_rl": ModuleType("nemo_rl"), "nemo_rl.algorithms": ModuleType("nemo_rl.algorithms")}
    modules |= {"nemo_rl.algorithms.loss": ModuleType("nemo_rl.algorithms.loss"), grpo.__name__: grpo}
    modules |= {sync.__name__: sync, "nemo_rl.algorithms.loss.interfaces": Interfaces("interfaces")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    grpo._create_advantage_estimator = sync._create_advantage_estimator = lambda master_config: "theirs"
    return grpo, sync


def loss_batch(rows):
    random = torch.Generator().manual_seed(4)
    shape = rows["mask"].shape
    sample_mask = torch.ones(shape[0])
    sample_mask[2] = 0.0
    data = {
        "token_mask": rows["mask"],
        "sample_mask": sample_mask,
        "advantages": torch.randn(shape, generator=random),
        "prev_logprobs": rows["policy"].masked_fill(rows["mask"] == 0, float("-inf")),
        "generation_logprobs": rows["policy"],
        "reference_policy_logprobs": rows["reference"],
    }
    now = (rows["policy"] + 0.4 * torch.randn(shape, generator=random))[:, 1:].requires_grad_()
    return data, now


@pytest.mark.parametrize("per_token", [True, False])
def test_the_loss_is_ours_and_adds_up_over_micro_batches(recorded, per_token):
    data, now = loss_batch(batch())
    settings = {"token_level_loss": per_token, "reference_policy_kl_penalty": 0.1, "ratio_clip_c": 3.0}
    loss_fn = nemo_rl.CapoLoss(settings)
    kind = Interfaces.LossType.TOKEN_LEVEL if per_token else Interfaces.LossType.SEQUENCE_LEVEL
    assert (loss_fn.loss_type, loss_fn.input_type) == (kind, Interfaces.LossInputType.LOGPROB)

    keep = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).bool()
    old = data["prev_logprobs"][:, 1:].where(keep, 0.0)
    plain = clipped_surrogate(now.where(keep, 0.0), old, data["advantages"][:, 1:], 0.2, 0.2, 3.0)
    plain = plain + 0.1 * kl_penalty(now, data["reference_policy_logprobs"][:, 1:])
    expected = (plain * reduction_weights(keep, "token-mean" if per_token else "seq-mean-token-mean")).sum()
    (wanted,) = torch.autograd.grad(expected, now)

    counts = {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": keep.sum()}
    total, metrics = torch.zeros(()), []
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        part = {name: value[rows] for name, value in data.items()}
        call = dict(zip(LOSS_CALL, (part, *counts.values(), now[rows]), strict=True))
        loss, found = loss_fn(**call)
        total = total + loss
        metrics.append(found)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, now)[0], wanted)
    assert sum(found["loss"] for found in metrics) == pytest.approx(expected.item(), rel=1e-5)
    assert sum(found["num_valid_samples"] for found in metrics) == 11
    assert sum(found["token_mult_prob_error"] for found in metrics) == pytest.approx(1.0)
    assert set(metrics[0]) == set(loss_fn.metric_normalizations)


def test_terms_that_the_loss_does_not_have_are_refused():
    for setting in ({"use_cispo": True}, {"sequence_level_importance_ratios": True}, {"use_kl_in_reward": True}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            nemo_rl.CapoLoss(setting)


def test_install_adds_a_name_and_leaves_the_others_alone(recorded):
    nemo_rl.install()
    nemo_rl.install()
    for trainer in recorded:
        config = SimpleNamespace(grpo=SimpleNamespace(adv_estimator={"name": "grpo"}), loss_fn=LOSS)
        assert trainer._create_advantage_estimator(config) == "theirs"
        config.grpo.adv_estimator = {"name": "capo", "tau": 0.5}
        made = trainer._create_advantage_estimator(config)
        assert isinstance(made, nemo_rl.CapoAdvantageEstimator)
        assert made.options.tau == 0.5


def test_without_nemo_rl_install_names_the_commit(monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    with pytest.raises(MissingTrainerError, match="NVIDIA-NeMo/RL at 7ea279abfbeb"):
        nemo_rl.install()
