"""What all adapters share: the options, and advantages of whole groups from means per response."""

import sys

import pytest
import torch

from capo_megatron import adapters
from capo_megatron.adapters import CapoOptions, MissingTrainerError, require_version, row_advantages
from capo_megatron.algorithms.equations import capo_advantage, capo_noise_mask
from capo_megatron.errors import CapoError, ConfigError


def _rows(seed=0, groups=5, size=4):
    random = torch.Generator().manual_seed(seed)
    count = groups * size
    mean = -torch.rand(count, generator=random)
    reference = -2 * torch.rand(count, generator=random)
    reward = torch.randint(0, 2, (count,), generator=random).float()
    return mean, reference, reward, torch.arange(count) // size


def test_advantages_are_the_pairwise_ones_times_the_noise_mask():
    mean, reference, reward, group = _rows()
    options = CapoOptions(tau=0.4, norm="group", ref_high=1.5, ref_low=1.4)
    every, keep = row_advantages(options, mean, torch.ones_like(reward).bool(), reward, group, reference)
    mask = capo_noise_mask(reference, reward > 0.5, 1.5, 1.4)
    assert 0 < mask.sum() < len(mask)
    assert torch.equal(keep, mask)
    assert torch.equal(every, capo_advantage(mean, reward, group, 0.4, norm="group") * mask)


def test_a_response_without_tokens_trains_nothing_and_is_nobodys_partner():
    mean, reference, reward, group = _rows()
    valid = torch.ones(20, dtype=torch.bool)
    valid[[0, 7, 13]] = False
    mean[~valid] = reference[~valid] = float("nan")
    every, _ = row_advantages(CapoOptions(), mean, valid, reward, group, reference)
    rest, _ = row_advantages(CapoOptions(), mean[valid], valid[valid], reward[valid], group[valid], reference[valid])
    assert torch.equal(every[valid], rest)
    assert not every[~valid].any()


def test_masked_rows_leave_the_pairs_if_told_so():
    mean, reference, reward, group = _rows()
    options = CapoOptions(mask_scope="pairs", ref_high=1.5, ref_low=1.4)
    valid = torch.ones(20, dtype=torch.bool)
    every, keep = row_advantages(options, mean, valid, reward, group, reference)
    assert torch.equal(every, capo_advantage(mean, reward, group, valid=keep))


def test_the_mask_asks_for_a_reference():
    mean, _, reward, group = _rows()
    valid = torch.ones(20, dtype=torch.bool)
    with pytest.raises(ConfigError, match="no reference log-probs"):
        row_advantages(CapoOptions(), mean, valid, reward, group)
    every, _ = row_advantages(CapoOptions(mask="off"), mean, valid, reward, group)
    assert torch.equal(every, capo_advantage(mean, reward, group))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tau": 0.0},
        {"tau": "0.6"},
        {"norm": "mean"},
        {"mask": "maybe"},
        {"mask_scope": "all"},
        {"ref_high": 0.5},
        {"correct_above": float("nan")},
        {"temperature": 0.6},
    ],
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CapoOptions.of(wrong, "capo")


def test_other_versions_of_a_trainer_are_refused_and_patches_warned_of(monkeypatch):
    monkeypatch.setattr(adapters, "version", lambda name: "1.16.3")
    with pytest.warns(UserWarning, match=r"1\.16\.3 is installed, this adapter was tested with 1\.16\.0"):
        require_version("trl", "1.16.0", "pip install trl==1.16.0")
    with pytest.raises(ConfigError, match=r"this adapter is for 1\.15\.0"):
        require_version("trl", "1.15.0", "pip install trl==1.15.0")
    monkeypatch.undo()
    with pytest.raises(MissingTrainerError, match="no-such-trainer is not installed"):
        require_version("no-such-trainer", "1.0", "install it")


def test_importing_the_trl_adapter_without_trl_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "capo_megatron.adapters.trl", raising=False)
    with pytest.raises(ImportError, match=r"pip install trl==1\.16\.0") as caught:
        import capo_megatron.adapters.trl  # noqa: F401
    assert isinstance(caught.value, CapoError)
    assert "\n" not in str(caught.value)
