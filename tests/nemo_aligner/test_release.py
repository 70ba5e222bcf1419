"""The adapter against the real NeMo-Aligner 0.7.0 (`make test-nemo-aligner`), on a CPU as `on_cpu.py` says."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

pytest.importorskip("nemo_aligner.package_info", reason="needs NeMo-Aligner 0.7.0: make test-nemo-aligner")

import on_cpu
from hydra import compose, initialize_config_dir
from nemo_aligner.algorithms.reinforce import ReinforceRolloutBatch, ReinforceTrainer
from nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor import MegatronGPTReinforceActorModel
from nemo_aligner.models.nlp.gpt.reward_critic_clients import RemoteGPTRMClient
from nemo_aligner.package_info import __version__
from nemo_aligner.utils.ppo_utils import create_mask
from omegaconf import OmegaConf

from capo_megatron.adapters import CapoOptions
from capo_megatron.adapters import nemo_aligner as adapter
from capo_megatron.adapters.nemo_aligner_prompts import Verifier
from capo_megatron.adapters.nemo_aligner_step import StepOptions, response_mask
from capo_megatron.algorithms.equations import capo_advantage, clipped_surrogate
from capo_megatron.config import RewardConfig
from capo_megatron.rewards import build_reward
from capo_megatron.types import Problem

EXAMPLES = Path(__file__).parents[2] / "examples" / "nemo_aligner"
CONSTRUCTOR = [
    "cfg",
    "model",
    "optimizer",
    "scheduler",
    "train_dataloader_builder",
    "val_dataloader_builder",
    "collate_fn",
    "rm",
    "batch_iterator_cls",
    "logger",
    "ckpt_callback",
    "run_timer",
]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


# --- signatures -----------------------------------------------------------------------------------------------------


def test_the_release_is_the_one_that_the_adapter_names():
    assert __version__ == adapter.NEMO_ALIGNER


def test_the_constructor_takes_the_twelve_arguments_that_the_entry_script_passes():
    assert parameters(ReinforceTrainer.__init__) == CONSTRUCTOR
    calls = [
        node
        for node in ast.walk(ast.parse((EXAMPLES / "train_capo_actor.py").read_text()))
        if isinstance(node, ast.Call)
    ]
    (made,) = [call for call in calls if ast.unparse(call.func) == "CapoTrainer"]
    assert [keyword.arg for keyword in made.keywords] == [*CONSTRUCTOR, "capo"]


@pytest.mark.parametrize(
    ("ours", "stock", "methods"),
    [
        (adapter.CapoTraining, ReinforceTrainer, ["generate_reinforce_data", "_run_inference"]),
        (adapter.SplitRows, ReinforceRolloutBatch, ["chunk"]),
        (
            adapter.CapoActing,
            MegatronGPTReinforceActorModel,
            ["infer", "get_actor_forward_output_and_loss_func", "get_loss_and_metrics"],
        ),
        (Verifier, RemoteGPTRMClient, ["infer_rm"]),
    ],
)
def test_every_override_has_the_signature_of_what_it_overrides(ours, stock, methods):
    for method in methods:
        assert parameters(vars(ours)[method]) == parameters(vars(stock)[method]), method
    others = {name for name in vars(ours) if name in dir(stock) and callable(vars(ours)[name]) and name[:2] != "__"}
    assert others == set(methods)


def test_methods_that_the_adapter_calls_are_there():
    assert parameters(MegatronGPTReinforceActorModel.get_inference_log_probs)[0] == "response_tokens"
    assert parameters(MegatronGPTReinforceActorModel.get_init_policy_logprobs) == ["response_tokens"]
    stacked = parameters(ReinforceRolloutBatch.from_rollout_batches)
    assert stacked == ["rollout_batches", "eos_id", "rollout_batch_seq_length"]
    assert parameters(ReinforceRolloutBatch.gather_and_balance_globally) == []
    assert parameters(ReinforceTrainer.compute_rollout_metrics) == ["rollout_batch"]


def test_classes_stand_in_front_of_the_stock_ones_and_are_found_by_the_name_in_a_checkpoint():
    pairs = {
        "CapoTrainer": (adapter.CapoTraining, ReinforceTrainer),
        "CapoActor": (adapter.CapoActing, MegatronGPTReinforceActorModel),
        "CapoRolloutBatch": (adapter.SplitRows, ReinforceRolloutBatch),
    }
    for name, (ours, stock) in pairs.items():
        made = getattr(importlib.import_module("capo_megatron.adapters.nemo_aligner"), name)
        assert made.__mro__[1] is ours and made.__mro__.index(stock) == 2
        assert f"{made.__module__}.{made.__qualname__}" == f"capo_megatron.adapters.nemo_aligner.{name}"
    with pytest.raises(AttributeError):
        adapter.CapoCritic  # noqa: B018


def test_everything_that_the_entry_script_imports_exists():
    tree = ast.parse((EXAMPLES / "train_capo_actor.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert len(imports) > 10
    for node in imports:
        module = importlib.import_module(node.module)
        for alias in node.names:
            assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_the_configuration_composes_over_the_stock_one(tmp_path, monkeypatch):
    stock = {
        "trainer": {"precision": "bf16", "reinforce": {"initial_policy_kl_penalty": 0.01, "max_steps": -1}},
        "remote_rm": {"pad_to_length": 8},
        "exp_manager": {"name": "x", "explicit_log_dir": "/results"},
        "model": {"reinforce": {"num_rollout_samples": 512}, "micro_batch_size": 1, "data": {"data_prefix": None}},
    }
    OmegaConf.save(OmegaConf.create(stock), tmp_path / "gpt_reinforce_actor.yaml")
    monkeypatch.setenv("NEMO_ALIGNER_CONF", str(tmp_path))
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        cfg = compose("capo_actor")
    assert cfg.trainer.reinforce == {"initial_policy_kl_penalty": 0, "max_steps": -1, "num_rollouts_per_prompt": 8}
    assert cfg.trainer.precision == "bf16" and cfg.remote_rm is None
    rows = cfg.model.reinforce.num_rollout_samples * cfg.trainer.reinforce.num_rollouts_per_prompt
    assert rows % cfg.model.global_batch_size == 0
    assert StepOptions.of(OmegaConf.to_container(cfg.trainer.capo)) == StepOptions()
    assert RewardConfig(**cfg.verifier).kind == "math_verify"
    assert set(cfg.model.capo) == {"clip_low", "clip_high", "dual_clip"}


# --- the defects, in the real classes -------------------------------------------------------------------------------


def test_the_stock_batch_gives_every_rank_all_rows_and_ours_deals_them():
    rows = {"rewards": torch.arange(8.0)}
    assert len(ReinforceRolloutBatch(rows).chunk(rank=1, split_size=4, seed=0)["rewards"]) == 8
    parts = [adapter.CapoRolloutBatch(rows).chunk(rank=rank, split_size=4, seed=0) for rank in range(4)]
    assert all(isinstance(part, adapter.CapoRolloutBatch) for part in parts)
    assert torch.cat([part["rewards"] for part in parts]).sort().values.tolist() == list(range(8))


def test_the_response_mask_is_that_of_the_release():
    values, prompts, responses = torch.rand(3, 6), torch.tensor([2, 1, 3]), torch.tensor([5, 7, 3])
    assert torch.equal(response_mask(values, prompts, responses), create_mask(values, prompts, responses).bool())


def one_generation():
    """`generate_reinforce_data` on a trainer without a constructor, stock and ours, with one batch."""
    batch = {
        "prompt_ids": torch.tensor([4, 4, 9, 9]),
        "prompt_tokens": torch.ones(4, 2, dtype=torch.int64),
        "response_tokens": torch.arange(28).view(4, 7),
        "prompt_lengths": torch.full((4,), 2),
        "response_lengths": torch.tensor([4, 7, 5, 6]),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "gradable": torch.ones(4),
        "is_end": torch.tensor([True, False, True, True]),
        "logprobs": -torch.rand(4, 6, generator=torch.Generator().manual_seed(0)),
    }
    cfg = OmegaConf.create({"initial_policy_kl_penalty": 0, "use_absolute_kl": True, "model_gbs": 4, "model_mbs": 2})
    stock = object.__new__(ReinforceTrainer)
    stock.cfg, stock.compute_init_policy_kl = cfg, False
    try:
        stock.generate_reinforce_data(batch)
        crash = ""
    except (RuntimeError, ValueError) as error:
        crash = str(error)
    ours = object.__new__(adapter.CapoTrainer)
    ours.cfg, ours.capo = cfg, StepOptions(options=CapoOptions(mask="off"))
    data, metrics = ours.generate_reinforce_data(batch)
    return crash, batch, data, metrics


def test_without_kl_the_stock_data_function_crashes_and_ours_makes_what_the_trainer_consumes(tmp_path):
    ((crash, batch, data, metrics),) = on_cpu.on_ranks(one_generation, 1, tmp_path)
    assert "dim" in crash
    shapes = {name: tuple(value.shape) for name, value in data.items()}
    assert shapes == {"response_tokens": (4, 7), "advantages": (4, 1), "prev_logprobs": (4, 6), "weights": (4, 6)}
    assert set(adapter.LAST_STAGE_KEYS) == set(data)
    mask = create_mask(batch["logprobs"], batch["prompt_lengths"], batch["response_lengths"]).bool()
    mean = (batch["logprobs"] * mask).sum(1) / mask.sum(1)
    expected = capo_advantage(mean, batch["rewards"] > 0.5, batch["prompt_ids"])
    torch.testing.assert_close(data["advantages"].squeeze(1), expected)
    assert expected[1] != 0 and expected[2] == 0  # cut off, and of a group of one class whose prompt equals the other's
    assert all(isinstance(value, float) for value in metrics.values())


def test_a_pipeline_stage_moves_what_it_reads(monkeypatch):
    from megatron.core import parallel_state

    actor = object.__new__(adapter.CapoActor)
    torch.nn.Module.__init__(actor)
    actor._cfg, table, seen = on_cpu.configuration(4, 2).model, on_cpu.Table(), []
    table.forward = lambda tokens, position_ids, attention_mask, labels: seen.append((tokens, position_ids))
    batch = {name: torch.zeros(2, 3) for name in (*adapter.LAST_STAGE_KEYS, "attention_mask", "position_ids")}
    for first, last in [(True, False), (False, False), (False, True)]:
        monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda first=first: first)
        monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda last=last: last)
        actor.get_actor_forward_output_and_loss_func()(iter([batch]), table)
    assert [(tokens is None, places is None) for tokens, places in seen] == [
        (False, False),
        (True, True),
        (False, True),
    ]
    assert set(batch) == adapter.stage_keys(first=True, last=True)


# --- the whole loop -------------------------------------------------------------------------------------------------


def one_step():
    """One rollout and one optimizer step in micro-batches of two, and the same step by plain autograd."""
    trainer = on_cpu.make_trainer(StepOptions(options=CapoOptions(mask="off")), gbs=16, mbs=2)
    before = trainer.model.model.weight.detach().clone()
    rows, _ = trainer._run_inference(trainer.train_dataloader_builder, consumed_samples=0, is_validation=False)
    data, _ = trainer.generate_reinforce_data(rows)
    trainer.run_training(iter([dict(data)]))
    return before, trainer.model.model.weight.detach(), dict(rows), trainer.logger.metrics[-1]


def test_an_optimizer_step_in_micro_batches_is_the_step_on_the_whole_batch(tmp_path):
    ((before, after, rows, metrics),) = on_cpu.on_ranks(one_step, 1, tmp_path)
    weight = before.clone().requires_grad_()
    tokens = rows["response_tokens"]
    logprobs = weight[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(rows["logprobs"], logprobs.detach())
    mask = create_mask(logprobs.detach(), rows["prompt_lengths"], rows["response_lengths"]).bool()
    mean = ((logprobs * mask).sum(1) / mask.sum(1)).detach()
    valid = rows["gradable"].bool()
    ends = zip(tokens.tolist(), rows["prompt_lengths"].tolist(), rows["response_lengths"].tolist(), strict=True)
    texts = [" ".join(str(token) for token in row[start:end] if token != on_cpu.EOS) for row, start, end in ends]
    grades = on_cpu.EvenFirst().grade([None] * 16, texts)
    assert rows["rewards"].tolist() == [grade.reward for grade in grades]  # each reward has met its own response
    assert valid.tolist() == [grade.verdict.gradable for grade in grades]
    assert 0 < valid.sum() < 16 and 0 < rows["is_end"].sum() < 16  # some cannot be judged, some were cut off
    advantage = capo_advantage(mean, rows["rewards"] > 0.5, rows["prompt_ids"], valid=valid)
    token = clipped_surrogate(logprobs, logprobs.detach(), advantage.unsqueeze(1))
    loss = ((token * mask).sum(1) / mask.sum(1))[valid].mean()
    loss.backward()
    torch.testing.assert_close(after, before - 0.5 * weight.grad, rtol=1e-5, atol=1e-6)
    assert metrics["train_optim/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert (after != before).any() and metrics["train_optim/clip_share"] == 0


def whole_run():
    """fit(): two rollouts of one optimizer step each, with the noise mask, and a validation."""
    trainer = on_cpu.make_trainer(StepOptions(), gbs=16, mbs=2)
    trainer.fit()
    logged = {name: value for entry in trainer.logger.metrics for name, value in entry.items() if "timers/" not in name}
    return trainer.model.model.weight.detach(), logged, trainer.consumed_samples


def test_training_does_not_depend_on_the_number_of_ranks_and_uses_every_prompt_once(tmp_path):
    ((alone, logged, consumed),) = on_cpu.on_ranks(whole_run, 1, tmp_path)
    assert consumed == 8  # prompts; the stock trainer counts 32 responses and would skip the other prompts
    for weight, same, count in on_cpu.on_ranks(whole_run, 2, tmp_path):
        torch.testing.assert_close(weight, alone, rtol=1e-5, atol=1e-6)
        assert count == 8
        for name in ("train_optim/loss", "train_rollouts/advantage_abs", "val_rollouts/rewards"):
            assert same[name] == pytest.approx(logged[name], abs=1e-5), name
    assert (alone != on_cpu.Table().weight).any()
    assert 0 < logged["train_rollouts/mask_kept_share"] < 1


def several_steps():
    trainer = on_cpu.make_trainer(StepOptions(algorithm="grpo"), gbs=4, mbs=1, steps=1)
    trainer.fit()
    return [entry["train_optim/approx_kl"] for entry in trainer.logger.metrics if "train_optim/approx_kl" in entry]


def test_the_ratio_is_to_the_policy_that_sampled_over_all_optimizer_steps_of_a_rollout(tmp_path):
    (kl, *_), *_ = [on_cpu.on_ranks(several_steps, 2, tmp_path)]
    assert len(kl) == 4 and kl[0] == pytest.approx(0, abs=1e-7) and kl[-1] > 1e-6


# --- rewards --------------------------------------------------------------------------------------------------------


def graded(kind):
    class Spelled(on_cpu.Tokens):
        def ids_to_text(self, ids):
            return "\\boxed{" + " + ".join(map(str, ids)) + "}"

    verifier = Verifier(build_reward(RewardConfig(kind=kind, workers=1)), [Problem("a", "", (1,), "5")] * 2, Spelled())
    batch = {
        "response_tokens": torch.tensor([[1, 5, 0, 0], [1, 2, 3, 0], [1, 2, 4, 0]]),
        "prompt_lengths": torch.tensor([1, 1, 1]),
        "response_lengths": torch.tensor([3, 4, 4]),
        "prompt_ids": torch.tensor([0, 1, 1]),
    }
    result = verifier.infer_rm(batch).result()
    verifier.close()
    return result


def by_both_kinds():
    return graded("exact"), graded("math_verify")


def test_this_package_grades_in_nemo_aligners_environment(tmp_path):
    ((exact, math),) = on_cpu.on_ranks(by_both_kinds, 1, tmp_path)
    assert exact.tolist() == [[1.0], [0.0], [0.0]]
    assert math.tolist() == [[1.0], [1.0], [0.0]]
