"""The NeMo-Aligner adapter without NeMo: fakes with the stock constructor and batch dicts, and plain maths.

`tests/nemo_aligner` holds the same against the real release.
"""

import subprocess
import sys
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

from capo_megatron.adapters import CapoOptions
from capo_megatron.adapters import nemo_aligner as adapter
from capo_megatron.adapters.nemo_aligner_prompts import KeepPromptIds, Prompts, Verifier, read_problems
from capo_megatron.adapters.nemo_aligner_step import (
    Rows,
    StepOptions,
    advantages,
    clipped_loss,
    response_mask,
    token_weights,
)
from capo_megatron.algorithms.equations import capo_advantage, clipped_surrogate
from capo_megatron.errors import ConfigError, DataError, ShapeError
from capo_megatron.types import Grade, Problem, Verdict

NO_MASK = StepOptions(options=CapoOptions(mask="off"))


class StockBatch(UserDict):
    """Like ReinforceRolloutBatch, whose `chunk` gives every rank all rows."""

    def chunk(self, rank, split_size, seed):
        return self


class StockTrainer:
    """The constructor of ReinforceTrainer, as far as the adapter sees it."""

    def __init__(
        self,
        cfg,
        model,
        optimizer,
        scheduler,
        train_dataloader_builder,
        val_dataloader_builder,
        collate_fn,
        rm,
        batch_iterator_cls,
        logger,
        ckpt_callback,
        run_timer,
    ):
        self.cfg, self.model, self.rm, self.collate_fn = cfg, model, rm, collate_fn


class Batch(adapter.SplitRows, StockBatch):
    pass


class Trainer(adapter.CapoTraining, StockTrainer):
    """One rank of `ranks`; `others` are the packed rows that the ranks would send, this rank's own included."""

    ranks, rank, others = 1, 0, None

    def _ranks(self):
        return self.ranks

    def _gather(self, packed):
        return (self.others or [packed]), self.rank


def make_trainer(capo=NO_MASK, gbs=4, mbs=2, penalty=0, prompts=2, samples=4):
    cfg = SimpleNamespace(
        initial_policy_kl_penalty=penalty, model_gbs=gbs, model_mbs=mbs, num_rollouts_per_prompt=samples
    )
    model = SimpleNamespace(cfg=SimpleNamespace(reinforce=SimpleNamespace(num_rollout_samples=prompts)))
    return Trainer(cfg, model, *[None] * 10, capo=capo)


def rollout(groups, rewards, seed=0, gradable=None, is_end=None):
    """What `_run_inference` hands to `generate_reinforce_data`: prompts of 2 tokens, responses of 1 to 4, S = 7."""
    rows = len(groups)
    generator = torch.Generator().manual_seed(seed)
    lengths = 3 + torch.randint(0, 4, (rows,), generator=generator)
    return {
        "prompt_ids": torch.tensor(groups),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "gradable": torch.ones(rows) if gradable is None else torch.tensor(gradable, dtype=torch.float32),
        "is_end": torch.ones(rows) if is_end is None else torch.tensor(is_end),
        "prompt_lengths": torch.full((rows,), 2),
        "response_lengths": lengths,
        "response_tokens": torch.randint(5, 50, (rows, 7), generator=generator),
        "logprobs": -torch.rand(rows, 6, generator=generator),
        "init_logprobs": -torch.rand(rows, 6, generator=generator),
    }


def expected_advantages(batch, valid=None):
    mask = response_mask(batch["logprobs"], batch["prompt_lengths"], batch["response_lengths"])
    mean = (batch["logprobs"] * mask).sum(1) / mask.sum(1)
    return capo_advantage(mean, batch["rewards"] > 0.5, batch["prompt_ids"], valid=valid)


# --- the defects of the stock classes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (10, 4), (7, 1)])
def test_chunk_deals_every_row_to_exactly_one_rank(rows, ranks):
    batch = Batch({"rewards": torch.arange(rows), "response_tokens": torch.arange(rows).repeat(3, 1).T})
    parts = [batch.chunk(rank=rank, split_size=ranks, seed=3) for rank in range(ranks)]
    assert sorted(torch.cat([part["rewards"] for part in parts]).tolist()) == list(range(rows))
    assert {len(part["rewards"]) for part in parts} <= {rows // ranks, -(-rows // ranks)}
    assert all(isinstance(part, Batch) and (part["response_tokens"][:, 0] == part["rewards"]).all() for part in parts)


def test_chunk_refuses_columns_of_different_length():
    with pytest.raises(ShapeError, match="rewards"):
        Batch({"rewards": torch.zeros(3), "is_end": torch.zeros(4)}).chunk(0, 2, 0)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 6])
def test_loss_and_gradient_do_not_depend_on_the_micro_batch_size(micro_batch):
    """6 targets per row: the stock loss is silently wrong for micro-batches of 6 and raises for 2 and 4."""
    batch = rollout([0] * 6 + [1] * 6, [1, 0, 0, 1, 0, 1] * 2)
    data, _ = make_trainer(gbs=12, mbs=micro_batch, prompts=2, samples=6).generate_reinforce_data(batch)
    current = (data["prev_logprobs"] + 0.3 * torch.randn(12, 6, generator=torch.Generator().manual_seed(1))).detach()
    current.requires_grad_()
    count = 12 // micro_batch
    for part in range(count):
        rows = slice(part * micro_batch, (part + 1) * micro_batch)
        micro = {key: value[rows] for key, value in data.items()}
        loss, _ = clipped_loss(current[rows], micro, 0.2, 0.2, None)
        (loss / count).backward()  # as Megatron's schedule divides

    reference = current.detach().requires_grad_()
    mask = response_mask(reference, batch["prompt_lengths"], batch["response_lengths"])
    token = clipped_surrogate(reference, data["prev_logprobs"], expected_advantages(batch).unsqueeze(1))
    ((token * mask).sum(1) / mask.sum(1)).mean().backward()
    torch.testing.assert_close(current.grad, reference.grad, rtol=1e-5, atol=1e-7)


def test_no_kl_penalty_works_and_another_is_refused():
    data, metrics = make_trainer(penalty=0).generate_reinforce_data(rollout([0] * 4 + [1] * 4, [1, 0, 1, 0] * 2))
    assert data["advantages"].abs().min() > 0 and metrics["trained_group_share"] == 1
    with pytest.raises(ConfigError, match=r"initial_policy_kl_penalty=0.01"):
        make_trainer(penalty=0.01)


def test_sampling_logprobs_stay_in_the_data_and_the_ratio_to_them_is_clipped():
    batch = rollout([0, 0], [1, 0])
    data, _ = make_trainer(gbs=2, mbs=2, prompts=1, samples=2).generate_reinforce_data(batch)
    mask = response_mask(batch["logprobs"], batch["prompt_lengths"], batch["response_lengths"])
    torch.testing.assert_close(data["prev_logprobs"][mask], batch["logprobs"][mask], rtol=0, atol=0)
    current = (data["prev_logprobs"] + 1.0).requires_grad_()  # ratio e: clipped for the correct row only
    loss, signs = clipped_loss(current, data, 0.2, 0.2, None)
    loss.backward()
    assert (current.grad[0] == 0).all() and (current.grad[1][mask[1]] > 0).all()
    assert signs[0].item() == pytest.approx(0.5)


def test_groups_are_prompt_ids_so_equal_prompts_with_distinct_ids_stay_apart():
    batch = rollout([0, 0, 7, 7], [1, 1, 0, 0])
    batch["response_tokens"][:, :2] = 9
    data, metrics = make_trainer(prompts=2, samples=2).generate_reinforce_data(batch)
    assert (data["advantages"] == 0).all() and metrics["trained_group_share"] == 0


def test_groups_may_be_uneven_and_their_rows_anywhere():
    batch = rollout([3, 5, 3, 3, 5, 9, 3, 3], [1, 0, 0, 1, 1, 1, 0, 0])
    data, _ = make_trainer().generate_reinforce_data(batch)
    torch.testing.assert_close(data["advantages"].squeeze(1), expected_advantages(batch))
    assert data["advantages"][5] == 0  # a group of one


def test_truncated_responses_count_like_all_others():
    ended = rollout([0] * 4, [1, 0, 1, 0])
    cut = rollout([0] * 4, [1, 0, 1, 0], is_end=[0.0, 0.0, 1.0, 0.0])
    trainer = make_trainer(prompts=1, samples=4)
    for name, value in trainer.generate_reinforce_data(ended)[0].items():
        torch.testing.assert_close(trainer.generate_reinforce_data(cut)[0][name], value, rtol=0, atol=0)


# --- what holds besides ---------------------------------------------------------------------------------------------


def test_advantages_and_weights_do_not_depend_on_the_split_over_ranks():
    batch = rollout([0, 1, 0, 1, 2, 2, 0, 1], [1, 0, 0, 1, 1, 0, 1, 0])
    whole, metrics = make_trainer(gbs=8, mbs=1).generate_reinforce_data(batch)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(4))
    parts = order.tensor_split(2)
    split = make_trainer(gbs=8, mbs=1)
    split.ranks = 2
    sent = []
    for rows in parts:
        local = {key: value[rows] for key, value in batch.items()}
        mask = response_mask(local["logprobs"], local["prompt_lengths"], local["response_lengths"])
        sent.append(split._rows(local, local["logprobs"], mask).pack())
    for rank, rows in enumerate(parts):
        split.rank, split.others = rank, sent
        data, same = split.generate_reinforce_data({key: value[rows] for key, value in batch.items()})
        for name in data:
            torch.testing.assert_close(data[name], whole[name][rows])
        assert same == pytest.approx(metrics)


def test_rows_without_a_verdict_are_in_no_statistic_no_loss_and_no_denominator():
    batch = rollout([0] * 4, [1, 0, 1, 0], gradable=[1, 1, 1, 0])
    data, _ = make_trainer(gbs=4, mbs=4, prompts=1, samples=4).generate_reinforce_data(batch)
    valid = torch.tensor([True, True, True, False])
    torch.testing.assert_close(data["advantages"].squeeze(1), expected_advantages(batch, valid))
    assert (data["weights"][3] == 0).all()
    torch.testing.assert_close(data["weights"].sum(1)[:3], torch.full((3,), 1 / 3))


def test_noise_mask_reads_the_initial_policy_and_drops_implausible_verdicts():
    batch = rollout([0] * 4, [1, 0, 1, 0])
    batch["init_logprobs"] = torch.tensor([-2.0, -0.5, -0.5, -0.01]).unsqueeze(1).expand(4, 6)
    data, metrics = make_trainer(StepOptions(), prompts=1, samples=4).generate_reinforce_data(batch)
    assert (data["advantages"].squeeze(1) == 0).tolist() == [True, False, False, True]
    assert metrics["mask_kept_share"] == 0.5


def test_grpo_is_the_alternative():
    batch = rollout([0] * 4, [1, 0, 0, 0])
    options = StepOptions(algorithm="grpo", scale_by_std=False)
    data, _ = make_trainer(options, prompts=1, samples=4).generate_reinforce_data(batch)
    torch.testing.assert_close(data["advantages"].squeeze(1), torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_weights_are_made_per_optimizer_step():
    rows = Rows(
        group=torch.zeros(4, dtype=torch.int64),
        mini_batch=torch.tensor([0, 0, 1, 1]),
        tokens=torch.tensor([1, 3, 2, 2]),
        valid=torch.ones(4, dtype=torch.bool),
        reward=torch.zeros(4),
        logprob_mean=torch.zeros(4),
        ref_logprob_mean=torch.zeros(4),
    )
    torch.testing.assert_close(token_weights(StepOptions(reduction="token-mean"), rows), torch.full((4,), 0.25))
    torch.testing.assert_close(token_weights(StepOptions(), rows), torch.tensor([1 / 2, 1 / 6, 1 / 4, 1 / 4]))


def test_padding_with_infinite_logprobs_leaves_loss_and_gradient_finite():
    batch = rollout([0] * 4, [1, 0, 1, 0])
    batch["logprobs"][:, 5] = -torch.inf
    batch["response_lengths"].clamp_(max=6)
    data, _ = make_trainer(prompts=1, samples=4).generate_reinforce_data(batch)
    current = batch["logprobs"].clone().requires_grad_()
    loss, _ = clipped_loss(current, data, 0.2, 0.2, None)
    loss.backward()
    assert loss.isfinite() and current.grad.isfinite().all()


def test_rows_survive_being_sent():
    batch = rollout([2**40, 3], [1, 0])
    trainer = make_trainer(gbs=2)
    mask = response_mask(batch["logprobs"], batch["prompt_lengths"], batch["response_lengths"])
    rows = trainer._rows(batch, batch["logprobs"], mask)
    for name, value in vars(Rows.unpack(rows.pack())).items():
        assert torch.equal(value, vars(rows)[name]), name


def test_invalid_options_are_named():
    with pytest.raises(ConfigError, match=r"trainer.capo: unknown option 'taus'"):
        StepOptions.of({"taus": 1})
    with pytest.raises(ConfigError, match=r"trainer.capo.options: unknown option 'taus'"):
        StepOptions.of({"options": {"taus": 1}})
    with pytest.raises(ConfigError, match="algorithm='ppo'"):
        StepOptions.of({"algorithm": "ppo"})
    with pytest.raises(ConfigError, match="global_batch_size=3"):
        make_trainer(gbs=3)
    assert StepOptions.of({"options": {"tau": 0.5}}).options.tau == 0.5


def test_an_actor_that_samples_from_a_changed_distribution_is_refused():
    class StockActor:
        def __init__(self, cfg, trainer):
            self.cfg = cfg

    class Actor(adapter.CapoActing, StockActor):
        pass

    sampling = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    cfg = SimpleNamespace(reinforce=SimpleNamespace(sampling_params=sampling))
    with pytest.raises(ConfigError, match=r"temperature=0.7"):
        Actor(cfg, trainer=None)


def test_infer_adds_the_ids_of_its_prompts():
    class StockActor:
        def infer(self, inference_batch):
            return {"response_tokens": inference_batch["text"]}

    class Actor(adapter.CapoActing, StockActor):
        def __init__(self):
            pass

    rolled = Actor().infer({"text": torch.zeros(2, 3), "prompt_ids": torch.tensor([4, 5])})
    assert rolled["prompt_ids"].tolist() == [4, 5]


# --- prompts and rewards --------------------------------------------------------------------------------------------


class Tokens:
    eos_id = 0

    def ids_to_text(self, ids):
        return " ".join(map(str, ids))


class SameText:
    """Correct if the response is the answer; nothing can be said where there is no answer."""

    def grade(self, problems, responses):
        pairs = zip(problems, responses, strict=True)
        verdicts = [
            Verdict.UNPARSEABLE if not p.answer else Verdict.CORRECT if r == p.answer else Verdict.WRONG
            for p, r in pairs
        ]
        return [Grade(verdict, float(verdict is Verdict.CORRECT)) for verdict in verdicts]

    def close(self):
        pass


def test_verifier_grades_each_response_against_the_problem_of_its_prompt_id():
    problems = [Problem(str(i), "p", (1, 2), answer) for i, answer in enumerate(["5 6", "7", ""])]
    verifier = Verifier(SameText(), problems, Tokens(), end_strings=["", " 9"])
    batch = {
        "response_tokens": torch.tensor([[1, 2, 7, 0, 0], [1, 2, 5, 6, 9], [1, 2, 5, 6, 0], [1, 2, 5, 0, 0]]),
        "prompt_lengths": torch.tensor([2, 2, 2, 2]),
        "response_lengths": torch.tensor([4, 4, 5, 4]),
        "prompt_ids": torch.tensor([1, 0, 1, 2]),
    }
    rewards = verifier.submit(batch).result()
    verifier.close()
    assert rewards[:3] == [1.0, 1.0, 0.0] and rewards[3] != rewards[3]
    graded = adapter._graded(torch.tensor(rewards).unsqueeze(1))
    assert graded["rewards"].tolist() == [1, 1, 0, 0] and graded["gradable"].tolist() == [1, 1, 1, 0]


def test_prompts_carry_the_place_of_their_problem_and_ids_pass_through_the_collate_function(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "ab", "answer": 1}\n{"text": "abcdef", "answer": 2}\n{"text": "abc", "answer": 3}\n')
    problems = read_problems(file, lambda text: [ord(c) for c in text], max_tokens=5)
    assert [(p.prompt, p.answer) for p in problems] == [("ab", "1"), ("abc", "3")]
    prompts = Prompts(problems * 2, range(2, 4))
    assert len(prompts) == 2 and prompts[1]["prompt_ids"] == 3 and prompts[1]["length"] == 3
    batch = KeepPromptIds(lambda rows: {"length": torch.tensor([row["length"] for row in rows])})(list(prompts))
    assert batch["prompt_ids"].tolist() == [2, 3] and batch["length"].tolist() == [2, 3]


@pytest.mark.parametrize("line", ['{"text": "a"}', "[1]", "{", '"text"'])
def test_a_broken_problem_file_is_named_with_its_line(tmp_path, line):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "ab", "answer": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=r"train.jsonl:2"):
        read_problems(file, list, max_tokens=5)


def test_importing_the_adapter_needs_torch_alone():
    code = (
        "import sys\n"
        "for name in 'nemo_aligner nemo tensorrt_llm megatron transformers pydantic math_verify'.split():\n"
        "    sys.modules[name] = None\n"
        "import capo_megatron.adapters.nemo_aligner, capo_megatron.adapters.nemo_aligner_prompts\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_advantages_of_a_step_without_any_verdict_are_zero():
    rows = Rows(*[torch.zeros(2, dtype=torch.int64)] * 3, torch.zeros(2, dtype=torch.bool), *[torch.zeros(2)] * 3)
    for options in (NO_MASK, StepOptions(algorithm="grpo")):
        assert (advantages(options, rows)[0] == 0).all() and (token_weights(options, rows) == 0).all()
