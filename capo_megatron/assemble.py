"""From a `RunConfig` to the parts of a run, in the order in which mistakes are cheapest to find.

Nothing is written before the config, the layout, the tokenizer, the problems and the weights have been accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2Config

from capo_megatron.algorithms import build as build_algorithm
from capo_megatron.config import RunConfig, describe_batch, dump
from capo_megatron.data import (
    ShuffledSource,
    check_tokenizer,
    encode,
    load_data,
    load_problems,
    load_template,
    make_task,
    stop_ids,
    tokenizer_for,
)
from capo_megatron.errors import DataError
from capo_megatron.evaluation.run import evaluate, summarise, write_records
from capo_megatron.mcore import runtime
from capo_megatron.mcore.checkpoint import DistCheckpointStore
from capo_megatron.mcore.hf_files import DirectorySource, WeightSource, hf_config, save_hf
from capo_megatron.mcore.hf_weights import RandomSource
from capo_megatron.mcore.memory import estimate
from capo_megatron.mcore.model import DTYPES, ModelShape, check_layout, read_shape
from capo_megatron.mcore.policy import MegatronPolicy
from capo_megatron.mcore.runtime import Runtime
from capo_megatron.rewards import build_reward
from capo_megatron.rollout.collect import gather_or_raise, share_of
from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.runlog import RunLog, make_folder, writing
from capo_megatron.seams import SamplingParams
from capo_megatron.trainer import Parts, train
from capo_megatron.types import EvalRecord, Problem
from capo_megatron.warmup import is_made, sign, train_config, warm_up

Say = Callable[[str], None]


def run_training(config: RunConfig, say: Say) -> int:
    """Train as configured, on the ranks that were started; the step reached. `say` shows a line to the user."""
    with ranks(config) as team:
        model = load_model(config, team, say)
        problems = load_data(config.data, model.tokenizer, config.seed)
        policy = model.policy(config.train.steps * config.train.minibatches * config.train.epochs)
        _say_once(say, team, _describe(config, model, policy, len(problems.train), problems.dropped))
        output = Path(config.output)
        log = RunLog(output, config.log, dump(config), team.rank, config.train.steps)
        store = DistCheckpointStore(output, team, config.checkpoint.keep)
        reward = build_reward(config.reward)
        try:
            parts = Parts(
                policy=policy,
                engine=model.engine(),
                reward=reward,
                prompts=ShuffledSource(problems.train, config.seed, config.data.shuffle),
                validation=problems.validation,
                algorithm=build_algorithm(config.algorithm),
                store=store,
                log=log,
                team=team,
                sampling=model.sampling,
                pad_id=model.pad_id,
            )
            return train(config, parts)
        finally:
            reward.close()
            log.close()


def run_sampling(config: RunConfig, questions: Sequence[str], problems: int, samples: int, say: Say) -> None:
    """Show `samples` responses to each question, or to the first validation problems if there are none."""
    with ranks(config) as team:
        model = load_model(config, team, say)
        if questions:
            template = load_template(config.data.template, config.data.system_prompt, model.tokenizer)
            prompts = [template(question) for question in questions]
            found = [
                Problem(f"prompt-{index}", prompt, tuple(ids), "")
                for index, (prompt, ids) in enumerate(zip(prompts, encode(model.tokenizer, prompts), strict=True))
            ]
        else:
            found = _held_out(config, model)[:problems]
        engine, _ = model.trained_engine()
        mine = [found[index] for index in share_of(len(found), engine.share)]
        for part in team.gather(engine.generate(mine, samples, model.sampling)):
            for problem, group in zip(found, part, strict=False):
                for sample in group:
                    _say_once(say, team, f"{problem.prompt}\n-> {sample.text}{' ...' if sample.truncated else ''}\n")
            found = found[len(part) :]


def run_evaluation(config: RunConfig, request: EvaluationRequest, say: Say) -> Path:
    """Sample and grade held-out problems, write the records and show accuracy and calibration; the records' file."""
    with ranks(config) as team:
        model = load_model(config, team, say)
        problems = _evaluation_problems(config, model, request)
        engine, step = model.trained_engine(request.base, request.step)
        params = replace(model.sampling, temperature=config.eval.temperature)
        reward = build_reward(config.reward)
        try:
            records = evaluate(
                engine,
                reward,
                problems,
                request.samples or config.eval.samples,
                params,
                team,
                model.pad_id,
                model="base" if request.base else config.algorithm.kind,
                step=step,
            )
        finally:
            reward.close()
        path = (
            request.records or Path(config.output) / "eval" / f"{'base' if request.base else f'step_{step:06d}'}.jsonl"
        )
        gather_or_raise(team, lambda: _save_records(path, records) if team.rank == 0 else None)
        summary = "  ".join(f"{name} {value:.4g}" for name, value in summarise(records).items())
        _say_once(say, team, f"{summary}\nrecords: {path}")
        return path


def _save_records(path: Path, records: Sequence[EvalRecord]) -> None:
    make_folder(path.parent)
    write_records(path, records)


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate beyond what the config says."""

    samples: int | None = None  # per problem; default: eval.samples
    problems: int | None = None  # at most so many
    base: bool = False  # the model before training
    step: int | None = None  # which checkpoint; default: the latest
    benchmarks: tuple[str, ...] = ()  # problem files instead of the run's own held-out problems
    records: Path | None = None  # where to write; default: eval/ in the run's folder


def describe(config: RunConfig, world: int) -> list[str]:
    """What a config means, as lines for a person: layout, batch arithmetic, memory. Starts nothing, writes nothing.

    Raises the same errors as a run would that come from the config, the model's shape, the tokenizer or the problems.
    """
    config.check(world)
    shape = shape_of(config)
    check_layout(shape, config.parallel)
    build_algorithm(config.algorithm)
    tokenizer = tokenizer_for(config.model, config.data)
    check_tokenizer(tokenizer, shape.vocab_size)
    problems = load_data(config.data, tokenizer, config.seed)
    layout = runtime.Layout.of(config.parallel, world)
    dtype = DTYPES[config.model.dtype]
    return [
        *describe_batch(config, world),
        f"problems      {len(problems.train):,} for training, {len(problems.validation):,} for validation",
        *estimate(shape, layout, dtype, config.train, config.parallel.distributed_optimizer),
    ]


@contextmanager
def ranks(config: RunConfig) -> Iterator[Runtime]:
    """The started ranks of a run whose config they all accept."""
    config.check(runtime.world_size())
    check_layout(shape_of(config), config.parallel)
    build_algorithm(config.algorithm)
    team = runtime.start(config.parallel, config.seed)
    try:
        yield team
    finally:
        team.stop()


def shape_of(config: RunConfig) -> ModelShape:
    """The model's shape, with the run's own number of positions if it sets one."""
    model = config.model
    if model.shape is not None:
        shape = ModelShape.of(model.shape)
    else:
        assert model.path is not None, "RunConfig.check requires one of both"
        shape = read_shape(model.path)
    return replace(shape, max_position_embeddings=model.max_position_embeddings or shape.max_position_embeddings)


@dataclass(frozen=True)
class Model:
    """A model before training: what it looks like, where its weights are, and how it is sampled."""

    config: RunConfig
    team: Runtime
    shape: ModelShape
    tokenizer: PreTrainedTokenizerBase
    weights: WeightSource
    sampling: SamplingParams

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def policy(self, optimizer_steps: int = 1) -> MegatronPolicy:
        """The model as a policy with its weights and its frozen reference."""
        config = self.config
        policy = MegatronPolicy(
            self.shape,
            self.team,
            config.train,
            dtype=DTYPES[config.model.dtype],
            total_steps=optimizer_steps,
            temperature=config.rollout.temperature,
            distributed_optimizer=config.parallel.distributed_optimizer,
        )
        reference = config.model.reference
        policy.load(self.weights if reference is None else DirectorySource(Path(reference)))
        policy.freeze_reference()
        if reference is not None:
            policy.load(self.weights)
        return policy

    def trained_engine(self, base: bool = False, step: int | None = None) -> tuple[TransformersEngine, int]:
        """An engine with the weights of a checkpoint, and its step; without one, the model before training."""
        policy = self.policy()
        reached = 0
        if not base:
            store = DistCheckpointStore(Path(self.config.output), self.team)
            found = store.load(policy, step)
            reached = found[0] if found else 0
        engine = self.engine()
        engine.load_weights(policy.hf_weights(), policy.version)
        return engine, reached

    def engine(self) -> TransformersEngine:
        """An engine of this shape, without weights; the ranks share the problems."""
        config = Qwen2Config(**hf_config(self.shape, self.config.model.dtype))
        share = (self.team.rank, self.team.size)
        dtype = DTYPES[self.config.model.dtype]
        return TransformersEngine(config, self.tokenizer, dtype, self.config.rollout.batch_size, share)


def load_model(config: RunConfig, team: Runtime, say: Say) -> Model:
    """The model of a run, warmed up first where the config says so. Collective."""
    shape = shape_of(config)
    tokenizer = tokenizer_for(config.model, config.data)
    check_tokenizer(tokenizer, shape.vocab_size)
    weights = _weights(config, team, shape, tokenizer, say)
    return Model(config, team, shape, tokenizer, weights, _sampling(config, tokenizer))


def _sampling(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    rollout = config.rollout
    task_stop = make_task(config.data, tokenizer, config.seed).stop if config.data.task else ()
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=stop_ids(tokenizer, (*rollout.stop, *task_stop)),
        seed=config.seed,
    )


def _held_out(config: RunConfig, model: Model) -> list[Problem]:
    """Problems that no training has seen: the validation problems, or a task's first evaluation problems."""
    found = load_data(config.data, model.tokenizer, config.seed).validation
    if not found and config.data.task:
        found = make_task(config.data, model.tokenizer, config.seed).evaluation_problems(64)
    return found


def _evaluation_problems(config: RunConfig, model: Model, request: EvaluationRequest) -> list[Problem]:
    """A task's evaluation problems, or those of the benchmark files, or the validation problems of the run's files."""
    if request.benchmarks:
        problems, _ = load_problems(request.benchmarks, config.data, model.tokenizer)
    elif config.data.task:
        return make_task(config.data, model.tokenizer, config.seed).evaluation_problems(request.problems or 512)
    else:
        problems = load_data(config.data, model.tokenizer, config.seed).validation
    if not problems:
        raise DataError("eval: no problems. Name files with --benchmark, or set data.validation.")
    return problems[: request.problems]


# --- the base model ---------------------------------------------------------------------------------------------------


def base_directory(config: RunConfig) -> Path:
    """Where the warm-up keeps its model: runs of one parent folder share it."""
    assert config.warmup is not None
    return Path(config.output).parent / config.warmup.path


def _weights(
    config: RunConfig, team: Runtime, shape: ModelShape, tokenizer: PreTrainedTokenizerBase, say: Say
) -> WeightSource:
    """The weights that training starts from: a directory's, a warm-up's, or seeded random ones."""
    start = DirectorySource(Path(config.model.path)) if config.model.path else RandomSource(shape, config.seed)
    if config.warmup is None:
        return start
    directory = base_directory(config)
    recipe = {
        "seed": config.seed,
        "model": asdict(config.model),
        "warmup": asdict(config.warmup),
        "task": config.data.task,
        "task_options": config.data.task_options,
    }
    if not team.gather(is_made(directory, recipe))[0]:
        _make_base(config, team, shape, tokenizer, start, directory, recipe, say)
    return DirectorySource(directory)


def _make_base(
    config: RunConfig,
    team: Runtime,
    shape: ModelShape,
    tokenizer: PreTrainedTokenizerBase,
    start: WeightSource,
    directory: Path,
    recipe: dict[str, Any],
    say: Say,
) -> None:
    warmup = config.warmup
    assert warmup is not None
    optimisation = train_config(warmup, config.train)
    policy = MegatronPolicy(shape, team, optimisation, dtype=DTYPES[config.model.dtype], total_steps=warmup.steps)
    policy.load(start)
    began = time.monotonic()

    def progress(step: int, loss: float) -> None:
        if step % max(1, warmup.steps // 10) == 0:
            left = (time.monotonic() - began) / step * (warmup.steps - step)
            _say_once(say, team, f"warm-up {step}/{warmup.steps}  loss {loss:.3f}  {left:.0f} s left")

    warm_up(warmup, policy, make_task(config.data, tokenizer, config.seed), tokenizer, progress)
    gather_or_raise(team, lambda: _save_base(policy, team, shape, tokenizer, directory, recipe))


def _save_base(
    policy: MegatronPolicy,
    team: Runtime,
    shape: ModelShape,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    recipe: dict[str, Any],
) -> None:
    weights = policy.hf_weights()
    if team.rank == 0:
        save_hf(directory, shape, weights)
        with writing(directory):
            tokenizer.save_pretrained(str(directory))
            sign(directory, recipe)
    for _ in weights:  # every rank takes part in gathering every tensor
        pass


def _say_once(say: Say, team: Runtime, text: str) -> None:
    if team.rank == 0:
        say(text)


def _describe(config: RunConfig, model: Model, policy: MegatronPolicy, problems: int, dropped: Any) -> str:
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    return (
        f"{config.algorithm.kind}: {problems} problems{f' (left out: {left_out})' if left_out else ''}, "
        f"{model.shape.num_hidden_layers} layers, {model.team.size} ranks, output {config.output}"
    )
