"""CAPO in slime: the hook on data as slime lays it out, over two data-parallel ranks of Megatron-core."""

from argparse import Namespace

import pytest
import torch

from capo_megatron.adapters import CapoOptions, slime
from capo_megatron.algorithms.equations import capo_advantage, capo_noise_mask
from capo_megatron.config import ParallelConfig
from capo_megatron.errors import ConfigError, ShapeError
from tests.parallel.launch import run_ranks

OPTIONS = CapoOptions(tau=0.4, ref_high=2.5, ref_low=2.5)


def samples():
    """(index, reward, log-probs, reference log-probs, mask) of three groups of four."""
    random = torch.Generator().manual_seed(7)
    rows = []
    for index in range(20, 32):  # the second rollout: slime goes on counting
        length = int(torch.randint(1, 6, (1,), generator=random))
        own, reference = -torch.rand(length, generator=random), -2 * torch.rand(length, generator=random)
        mask = torch.ones(length, dtype=torch.int)
        mask[1:2] = 0  # e.g. a tool's output
        rows.append((index, float(torch.randint(0, 2, (1,), generator=random)), own, reference, mask))
    return rows


def arguments(**changed):
    settings = {"n_samples_per_prompt": 4, "use_rollout_logprobs": False, "normalize_advantages": False, "kl_coef": 0.0}
    return Namespace(**settings | {"capo_tau": 0.4, "capo_ref_high": 2.5, "capo_ref_low": 2.5} | changed)


def rollout_data(rows):
    """The keys that slime's actor has when it calls the hook (process_rollout_data, compute_log_prob)."""
    index, reward, own, reference, mask = map(list, zip(*rows, strict=True))
    return {
        "sample_indices": index,
        "rewards": [0.0] * len(rows),  # normalised by slime: not to be used
        "local_raw_reward": reward,
        "log_probs": own,
        "ref_log_probs": reference,
        "loss_masks": mask,
        "total_lengths": [len(m) + 3 for m in mask],
        "response_lengths": [len(m) for m in mask],
    }


def expected():
    rows = samples()
    means, references = (torch.stack([row[at][row[4].bool()].mean() for row in rows]) for at in (2, 3))
    reward = torch.tensor([row[1] for row in rows])
    keep = capo_noise_mask(references, reward, 2.5, 2.5)
    assert 0 < keep.sum() < len(keep)
    every = capo_advantage(means, reward, torch.arange(20, 32) // 4, 0.4) * keep
    return {row[0]: value for row, value in zip(rows, every.tolist(), strict=True)}


def _run(shares, args):
    from capo_megatron.mcore import runtime

    started = runtime.start(ParallelConfig(), seed=0)
    rank = torch.distributed.get_rank()
    rows = samples()
    data = rollout_data([rows[at] for at in shares[rank]])
    try:
        slime.compute_advantages(args, data)
        assert [len(row) for row in data["advantages"]] == [len(row) for row in data["log_probs"]]
        assert all(torch.equal(a, r) for a, r in zip(data["advantages"], data["returns"], strict=True))
        return {i: row.tolist() for i, row in zip(data["sample_indices"], data["advantages"], strict=True)}
    finally:
        started.stop()


@pytest.mark.parallel
def test_groups_are_gathered_over_the_data_parallel_ranks():
    shares = [[11, 0, 5, 2, 8], [1, 3, 4, 6, 7, 9, 10]]  # by length, and not the same number on each
    first, second = run_ranks(_run, 2, shares, arguments())
    found = first | second
    for index, value in expected().items():
        assert found[index] == pytest.approx([value] * len(found[index]), abs=1e-6)


def test_samples_that_context_parallel_ranks_share_are_put_together():
    parts = []
    for index, reward, own, reference, mask in samples():
        for tokens in (slice(0, 1), slice(1, None)):
            keep = mask[tokens].bool()
            sums = (own[tokens][keep].sum().item(), reference[tokens][keep].sum().item())
            parts.append(slime.Part(index, reward, int(keep.sum()), *sums))
    found = slime.sample_advantages(OPTIONS, parts[::-1], 4)
    assert found == pytest.approx(expected(), abs=1e-6)


def test_arguments_that_leave_out_or_contradict_are_named():
    data = rollout_data(samples())
    for changed, said in (
        ({"normalize_advantages": True}, "--normalize-advantages"),
        ({"kl_coef": 0.1}, r"--kl-coef 0\.1"),
        ({"use_rollout_logprobs": True}, "rollout_log_probs: slime has left them out"),
        ({"capo_temperature": 1.0}, "unknown option 'temperature'"),
    ):
        with pytest.raises(ConfigError, match=said):
            slime.compute_advantages(arguments(**changed), data)
    with pytest.raises(ConfigError, match="--get-mismatch-metrics"):
        slime.compute_advantages(arguments(), {**data, "log_probs": None})
    with pytest.raises(ConfigError, match="--use-kl-loss --kl-loss-coef 0"):
        slime.compute_advantages(arguments(), {**data, "ref_log_probs": None})
    with pytest.raises(ShapeError, match="occurs twice"):
        slime.compute_advantages(arguments(), {**data, "sample_indices": [20] * 12})
    with pytest.raises(ShapeError, match="local_raw_reward or a sample index"):
        slime.compute_advantages(arguments(), {**data, "sample_indices": [None] * 12})
