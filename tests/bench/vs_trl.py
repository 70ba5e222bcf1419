"""A GRPO step of this program beside one of TRL's `GRPOTrainer`: same model, weights, prompts, reward, one process.

    python tests/bench/vs_trl.py [--rounds 2] [--steps 20] [--threads 2]

Runs ours and TRL's in turn (ours, TRL, ours, TRL), each in a fresh process, and prints the median step of each, the
mean length of the responses, what our steps were spent on, and the ratio ours / TRL's, of which the target is 0.9.

TRL is only needed here: `pip install trl==1.16.0 datasets accelerate`.

What is compared: a randomly initialised Qwen2 (4 layers, hidden 128, vocabulary 19, float32), 16 prompts of 8 tokens,
8 responses each of at most 64 tokens, on-policy, one update per step, no KL. The learning rate is tiny, so that both
sample from the same distribution to the end: every token ends the response with probability 1/19, which makes 18 tokens
on average. Ours also scores the old log-probs and entropies (TRL takes the current log-probs for the old ones, which is
the same here), refits its engine and proves the refit, and grades in other processes. Neither saves, evaluates, or
prints. TRL runs as it is fastest here: no gradient checkpointing, no bfloat16 autocast; its fused AdamW stays.

A step lasts from the end of the one before to its own end; `--skip` first steps are left out. "cpu" is the time all
threads of the process worked, the number to look at on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = 0.9
TRL_VERSION = "1.16.0"
PROMPTS, SAMPLES, MAX_TOKENS = 16, 8, 64
LEARNING_RATE = 1e-9
SYMBOLS = "0123456789+-*/=?:"  # with padding and end-of-sequence: 19
MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "vocab_size": 19,
}


def main() -> None:
    options = _options()
    sys.path.insert(0, str(REPOSITORY))  # the package need not be installed
    if options.measure is not None:
        side, folder = options.measure
        print(json.dumps({"ours": measure_ours, "trl": measure_trl}[side](Path(folder), options)))
        return
    _require_trl()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for _ in range(options.rounds):
            for side, found in runs.items():
                found.append(_measure_apart(side, folder, options))
                print(f"{side:5} {_line(found[-1]['steps'])}", flush=True)
    report(runs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="measured in each run")
    parser.add_argument("--skip", type=int, default=5, help="warm-up steps of each run, not measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, help="of ours; default: the program's")
    parser.add_argument("--measure", nargs=2, metavar=("SIDE", "FOLDER"), help="one run, in this process")
    return parser.parse_args()


def _require_trl() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("trl")
    except PackageNotFoundError:
        sys.exit(f"TRL is not installed: pip install trl=={TRL_VERSION} datasets accelerate")
    if found != TRL_VERSION:
        print(f"TRL {found} is installed, the target is for {TRL_VERSION}.", flush=True)


# --- what both share --------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Write the model with its tokenizer, and the problems: all that either side reads."""
    from capo_megatron.data.tokenizer import character_tokenizer
    from capo_megatron.weights.huggingface import save_hf
    from capo_megatron.weights.shape import ModelShape
    from capo_megatron.weights.sources import RandomSource
    from capo_megatron.weights.table import hf_shapes

    shape = ModelShape(**MODEL, tie_word_embeddings=True)
    source = RandomSource(shape, seed=0)
    save_hf(folder / "model", shape, ((name, source.read(name)) for name in hf_shapes(shape)))
    character_tokenizer(SYMBOLS, eos="$", pad="_").save_pretrained(str(folder / "tokenizer"))
    prompts = [f"{number % 10}+{number // 10 % 10}*{number // 100 % 10}-7=" for number in range(0, 1000, 3)]
    rows = (json.dumps({"problem": prompt, "answer": "digits"}) for prompt in prompts)
    (folder / "problems.jsonl").write_text("\n".join(rows) + "\n")


def digit_share(text: str) -> float:
    """The reward: the share of digits in the response. It tells the responses of a group apart."""
    return sum(symbol.isdigit() for symbol in text) / max(1, len(text))


def grade(problem: Any, response: str) -> float:
    """`digit_share` as a reward function of this program."""
    return digit_share(response)


class Clock:
    """Notes the time at the end of every step."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))

    def steps(self, skip: int) -> list[tuple[float, float]]:
        """(seconds, cpu seconds) of each step after the first `skip`."""
        pairs = zip(self._marks[skip - 1 :], self._marks[skip:], strict=False)
        return [(end[0] - start[0], end[1] - start[1]) for start, end in pairs]


# --- ours -------------------------------------------------------------------------------------------------------------


def measure_ours(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A run as `capo-megatron train` makes it, in this process."""
    import torch

    from capo_megatron import assemble
    from capo_megatron.config import load
    from capo_megatron.runlog.log import RunLog

    torch.set_num_threads(options.threads)
    clock = Clock()

    class TimedLog(RunLog):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            super().step(step, metrics)
            clock.mark()

    assemble.RunLog = TimedLog  # type: ignore[misc]  # to learn the processor time: metrics.jsonl has the seconds
    output = Path(tempfile.mkdtemp(dir=folder))
    assemble.run_training(load(None, _settings(folder, output, options)), say=lambda text: None)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][options.skip :]
    names = {name for row in rows for name in row}
    phases = sorted(name for name in names if name.startswith("seconds/") or name.endswith("seconds"))
    return {
        "steps": clock.steps(options.skip),
        "length": statistics.mean(row["response/length"] for row in rows),
        "phases": {name: statistics.median(row[name] for row in rows) for name in phases},
    }


def _settings(folder: Path, output: Path, options: argparse.Namespace) -> list[str]:
    settings = {
        "output": output,
        "model.path": folder / "model",
        "model.tokenizer": folder / "tokenizer",
        "model.dtype": "float32",
        "data.train": json.dumps([str(folder / "problems.jsonl")]),
        "data.template": "plain",
        "data.max_prompt_tokens": 16,
        "reward.kind": f"{Path(__file__).resolve()}:grade",
        "rollout.prompts": PROMPTS,
        "rollout.samples": SAMPLES,
        "rollout.max_tokens": MAX_TOKENS,
        "algorithm.kind": "grpo",
        "train.steps": options.skip + options.steps,
        "train.minibatches": 1,
        "train.lr": LEARNING_RATE,
        "checkpoint.every": 0,
        "eval.every": 0,
        "log.console": "off",
        "log.samples": 0,
    }
    if options.micro_batch_tokens:
        settings["train.micro_batch_tokens"] = options.micro_batch_tokens
    return [f"{name}={value}" for name, value in settings.items()]


# --- TRL's ------------------------------------------------------------------------------------------------------------


def measure_trl(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same run by TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    clock, lengths = Clock(), []

    class Timer(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    def reward(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        lengths.append(statistics.mean(map(len, completion_ids)))
        return [digit_share(text) for text in completions]

    rows = map(json.loads, (folder / "problems.jsonl").read_text().splitlines())
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=MAX_TOKENS,
        max_steps=options.skip + options.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": row["problem"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        callbacks=[Timer()],
    )
    trainer.train()
    return {"steps": clock.steps(options.skip), "length": statistics.mean(lengths[options.skip :])}


# --- the comparison ---------------------------------------------------------------------------------------------------


def _measure_apart(side: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    own = ["--steps", options.steps, "--skip", options.skip, "--threads", options.threads]
    if options.micro_batch_tokens:
        own += ["--micro-batch-tokens", options.micro_batch_tokens]
    command = [sys.executable, __file__, "--measure", side, folder, *map(str, own)]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = str(options.threads)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\n{side}: the run failed, see above.")
    return json.loads(done.stdout.splitlines()[-1])


def _line(steps: Sequence[tuple[float, float]]) -> str:
    wall, cpu = (statistics.median(values) for values in zip(*steps, strict=True))
    fastest = min(seconds for seconds, _ in steps)
    return f"{wall:.3f} s a step (median of {len(steps)}; fastest {fastest:.3f} s), cpu {cpu:.3f} s"


def report(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the medians over all runs, our phases, and the ratio."""
    print()
    medians = {}
    for side, found in runs.items():
        steps = [step for run in found for step in run["steps"]]
        medians[side] = [statistics.median(values) for values in zip(*steps, strict=True)]
        length = statistics.mean(run["length"] for run in found)
        print(f"{side:5} {_line(steps)}, {length:.1f} tokens a response")
    print("ours, by phase:")
    for name in runs["ours"][0]["phases"]:
        seconds = statistics.median(run["phases"][name] for run in runs["ours"])
        print(f"  {name:24} {seconds:.4f} s")
    wall, cpu = (ours / theirs for ours, theirs in zip(medians["ours"], medians["trl"], strict=True))
    verdict = "reached" if wall <= TARGET else "missed"
    print(f"ours / TRL's: {wall:.2f} by the clock, {cpu:.2f} by processor time (target {TARGET}: {verdict})")


if __name__ == "__main__":
    main()
