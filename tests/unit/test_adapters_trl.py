"""CAPO in TRL, for real: `make test-trl`. Skipped where TRL is not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config

from capo_megatron.adapters.trl import CapoTrainer, CapoTrainerConfig
from capo_megatron.algorithms.equations import capo_advantage, capo_noise_mask, sequence_logprob_mean
from capo_megatron.data.chain import chain_tokenizer
from capo_megatron.errors import ConfigError

PROMPTS = [f"{first}+{second}=" for first in range(6) for second in range(4)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=17,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    chain_tokenizer().save_pretrained(folder)
    return folder


def has_even_digit(completions, **_):
    return [float(any(symbol in "02468" for symbol in text)) for text in completions]


def is_short(completions, **_):
    return [float(len(text) < 3) for text in completions]


def config(folder, **changed):
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "num_generations": 4,
        "max_completion_length": 5,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "temperature": 0.8,
        "capo_ref_high": 12.0,
        "capo_ref_low": 11.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return CapoTrainerConfig(**settings | changed)


class Recording(CapoTrainer):
    """Keeps what training saw: the scored rows and the rewards, with the weights that sampled them."""

    seen = None

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.seen = [*(self.seen or []), (output, self._all_rewards.clone(), weights)]
        return output


def trainer(base, args, reward_funcs=has_even_digit):
    return Recording(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs,
        args,
        Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=chain_tokenizer(),
    )


def logprob_mean(model, output, temperature):
    """Means by a plain forward pass of transformers, which knows nothing of TRL."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits / temperature
    every = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    width = output["completion_ids"].shape[1]
    return sequence_logprob_mean(every[:, -width:], output["completion_mask"])[0]


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_it_trains_on_our_advantages(base, tmp_path, beta, steps_per_generation):
    run = trainer(base, config(tmp_path, beta=beta, steps_per_generation=steps_per_generation))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    assert any(not torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    logged = [row for row in run.state.log_history if "loss" in row]
    assert len(logged) == 4
    assert all(torch.tensor(row["grad_norm"]).isfinite() for row in logged)
    assert 0 < logged[0]["capo/kept"] < 1, "the thresholds of this test should mask some"
    assert run.beta == run.args.beta == beta
    assert ("kl" in logged[0]) == (beta > 0)

    assert len(run.seen) == 4 // steps_per_generation
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    trained = 0
    for output, rewards, weights in run.seen:
        plain.load_state_dict(before)
        reference = logprob_mean(plain, output, 0.8)
        plain.load_state_dict(weights)
        own = logprob_mean(plain, output, 0.8)
        correct = rewards[:, 0] > 0.5
        group = torch.arange(len(own)) // 4
        expected = capo_advantage(own, correct, group, 0.6) * capo_noise_mask(reference, correct, 12.0, 11.0)
        torch.testing.assert_close(output["advantages"], expected, rtol=0, atol=1e-6)
        trained += int(expected.count_nonzero())
    assert trained > 0


def test_without_the_mask_there_is_no_reference_model(base, tmp_path):
    run = trainer(base, config(tmp_path, capo_mask="off", max_steps=1))
    assert run.ref_model is None
    run.train()
    assert [row["capo/kept"] for row in run.state.log_history if "loss" in row] == [1.0]


def test_evaluation_compares_whole_groups_too(base, tmp_path):
    run = trainer(base, config(tmp_path, per_device_eval_batch_size=6, num_generations_eval=3))
    metrics = run.evaluate(Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[:4]]))
    assert 0 <= metrics["eval_capo/kept"] <= 1
    assert [len(output["advantages"]) for output, _, _ in run.seen] == [6, 6]
    for output, rewards, weights in run.seen:
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        plain.load_state_dict(weights)
        mean, correct = logprob_mean(plain, output, 0.8), rewards[:, 0] > 0.5
        expected = capo_advantage(mean, correct, torch.arange(6) // 3) * capo_noise_mask(mean, correct, 12.0, 11.0)
        torch.testing.assert_close(output["advantages"], expected, rtol=0, atol=1e-6)


def test_the_model_card_names_capo(base, tmp_path):
    run = trainer(base, config(tmp_path))
    run.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "2604.12632" in card
    assert "2402.03300" not in card


def test_of_several_rewards_one_must_say_who_is_correct(base, tmp_path):
    rewards = [is_short, has_even_digit]
    with pytest.raises(ConfigError, match=r"capo_correct_reward=None.*is_short, has_even_digit"):
        trainer(base, config(tmp_path), rewards)
    run = trainer(base, config(tmp_path, capo_correct_reward="has_even_digit", max_steps=1), rewards)
    run.train()
    _, seen, _ = run.seen[0]
    share = (seen[:, 1] > 0.5).float().mean().item()
    assert run.state.log_history[0]["capo/correct"] == pytest.approx(share)


def test_options_that_contradict_are_refused(base, tmp_path):
    for wrong in (
        {"scale_rewards": "batch"},
        {"scale_rewards": False},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"capo_tau": -1.0},
        {"sync_ref_model": True},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong)).removeprefix("capo_")):
            config(tmp_path, **wrong)
    with pytest.raises(ConfigError, match="expected a CapoTrainerConfig"):
        CapoTrainer(str(base), has_even_digit, None)


def test_another_version_of_trl_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setattr("capo_megatron.adapters.version", lambda name: "1.17.0")
    with pytest.raises(ConfigError, match=r"trl 1\.17\.0 is installed, this adapter is for 1\.16\.0"):
        trainer(base, config(tmp_path))


def test_groups_that_span_processes_give_whole_advantages(base, tmp_path):
    """Two processes with two rows each of a group of four: each gets its half of the group's advantages."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command += [__file__, str(base), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    halves = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    assert torch.equal(halves[0]["rewards"], halves[1]["rewards"])
    own, reference, advantages = (
        torch.cat([half[name] for half in halves]) for name in ("own", "reference", "advantages")
    )
    correct = halves[0]["rewards"][:, 0] > 0.5
    group = torch.arange(4) // 4
    expected = capo_advantage(own, correct, group, 0.6) * capo_noise_mask(reference, correct, 1e6, 1e-6)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-6)
    assert 0 < correct.sum() < 4, "the seed of this test should give a mixed group"


def _rank(base, folder):
    args = config(
        folder,
        per_device_train_batch_size=2,
        steps_per_generation=1,
        max_steps=1,
        capo_ref_high=1e6,
        capo_ref_low=1e-6,
        seed=1,
    )
    run = trainer(base, args)
    run.train()
    output, rewards, _ = run.seen[0]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    mean = logprob_mean(plain, output, 0.8)  # of the first step, before any update: the policy is the reference
    found = {"rewards": rewards, "own": mean, "reference": mean, "advantages": output["advantages"]}
    torch.save(found, Path(folder) / f"rank_{args.process_index}.pt")


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), sys.argv[2])
