"""CAPO by TRL's trainer on the laptop task, to be compared with CAPO by ours.

    make .venv-trl/.installed
    .venv/bin/python tests/bench/quickstart_seeds.py
    .venv-trl/bin/python tests/bench/trl_capo.py [--ours runs/quickstart-seeds] [--seed 0] [--output runs/trl-capo]

Trains the base model of one of those quickstart runs by `capo_megatron.adapters.trl.CapoTrainer` with the
hyperparameters of examples/quickstart.yaml, and evaluates the result as the quickstart does: 2,048 questions that no
training sees, 16 samples each, by this program. Prints accuracy and AUC-mean beside those of our runs, and exits with 1
if either is further from their mean than two of their standard deviations. Run both on one machine: rounding differs
between processors, and the same seed ends elsewhere on another one.

The one difference in the method: our run estimates the thresholds of the noise mask from its first batch, and here they
are given, as a quickstart run found them (seed 0).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES, STEPS, MINIBATCHES = 128, 8, 120, 2
LEARNING_RATE = 5e-4
FIGURES = ("accuracy", "auc_mean")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", type=Path, default=Path("runs/quickstart-seeds"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/trl-capo"))
    parser.add_argument("--questions", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=STEPS, help="rollouts; fewer is for trying this file out")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))  # the package need not be installed
    model, began = options.output / "model", time.monotonic()
    train(options, model)
    print(f"trained {options.steps} steps in {time.monotonic() - began:.0f} s")
    return report(evaluate(model, options.output / "records.jsonl", options.questions), options.ours)


def train(options: argparse.Namespace, model: Path) -> None:
    """Train the base model and export the result, tokenizer included."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from capo_megatron.adapters.trl import CapoTrainer, CapoTrainerConfig
    from capo_megatron.data.chain import ChainOptions, ChainTask

    base = options.ours / f"seed_{options.seed}" / "base"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)  # AutoTokenizer would make it a Qwen2's
    problems = ChainTask(ChainOptions(), tokenizer, seed=options.seed).train_problems(4000)
    rows = [{"prompt": p.prompt, "answer": p.answer, "digits": p.extra["digits"]} for p in problems]
    settings = CapoTrainerConfig(
        output_dir=str(options.output),
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * SAMPLES // MINIBATCHES,
        steps_per_generation=MINIBATCHES,
        num_generations=SAMPLES,
        max_completion_length=8,
        max_steps=options.steps * MINIBATCHES,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"lr_end": LEARNING_RATE / 20, "power": 1.0},
        adam_beta2=0.95,
        loss_type="dapo",  # a mean over tokens, as in the quickstart
        capo_tau=0.4,
        capo_norm="group",
        capo_ref_high=1.153,
        capo_ref_low=1.258,
        logging_steps=20 * MINIBATCHES,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = CapoTrainer(policy, grade, settings, Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(model))


def grade(completions: list[str], answer: list[str], digits: list[int], **_: Any) -> list[float]:
    """1.0 for as many digits as the question has operations, the last of which is the answer."""
    rows = zip(completions, answer, digits, strict=True)
    return [float(len(text) == count and text[-1] == key) for text, key, count in rows]


def evaluate(model: Path, records: Path, questions: int) -> dict[str, float]:
    """Accuracy, AUC-mean and the rest on held-out questions, by this program."""
    from capo_megatron.evaluation.run import read_records, summarise

    options = ["data.task=chain", "data.template=plain", "data.max_prompt_tokens=16", "reward.kind=task"]
    options += ["rollout.max_tokens=8", "model.dtype=float32", "eval.samples=16"]
    command = [sys.executable, "-m", "capo_megatron", "eval", str(model.resolve()), *options]
    command += ["--problems", str(questions), "--output", str(records.resolve())]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return summarise(list(read_records(records)))


def report(found: dict[str, float], ours: Path) -> int:
    """Print each figure beside ours; 1 if one lies outside of their spread."""
    from capo_megatron.evaluation.run import read_records, summarise

    seeds = [summarise(list(read_records(path))) for path in sorted(ours.glob("seed_*/capo.jsonl"))]
    outside = 0
    for name in FIGURES:
        values = [seed[name] for seed in seeds]
        centre, spread = mean(values), stdev(values)
        inside = abs(found[name] - centre) <= 2 * spread
        outside += not inside
        each = ", ".join(f"{value:.4f}" for value in values)
        verdict = "within" if inside else "OUTSIDE"
        print(f"{name:9} {found[name]:.4f}  ours {centre:.4f} ± {spread:.4f} ({each}): {verdict}")
    print(f"AUC-mean is over {found['auc_questions']:.0f} questions")
    return min(outside, 1)


if __name__ == "__main__":
    sys.exit(main())
