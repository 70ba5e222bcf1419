"""From a `RunConfig` to the parts of a run, in the order in which mistakes are cheapest to find.

Nothing is written before the config, the layout, the tokenizer, the problems, the weights, the reward function, the
output folder and the checkpoint in it have been accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from capo_megatron.agreement import gather_or_raise, on_first_rank
from capo_megatron.algorithms import build as build_algorithm
from capo_megatron.config import DataConfig, RunConfig, describe_batch, dump
from capo_megatron.data import (
    Data,
    ShuffledSource,
    encode,
    load_data,
    load_problems,
    load_template,
    make_task,
    one_token_per_character,
)
from capo_megatron.errors import ConfigError, DataError
from capo_megatron.evaluation.run import evaluate, summarise, write_records
from capo_megatron.evaluation.unfinished import Unfinished
from capo_megatron.mcore import fp8, runtime, versions
from capo_megatron.mcore.checkpoint import DistCheckpointStore
from capo_megatron.mcore.memory import GIB, Plan, check_vllm, describe_vllm, gpu_here
from capo_megatron.mcore.model import DTYPES
from capo_megatron.mcore.runtime import Runtime
from capo_megatron.model import Model
from capo_megatron.notices import warn_once
from capo_megatron.rewards import build_reward
from capo_megatron.rollout import channel, vllm
from capo_megatron.rollout.collect import share_of
from capo_megatron.runlog import check_writable, make_folder
from capo_megatron.runlog.log import RunLog
from capo_megatron.runlog.trackers import require_packages
from capo_megatron.seams import Algorithm, RewardFunction, RolloutEngine, Signal, Solo
from capo_megatron.trainer import Parts, take_up, train
from capo_megatron.types import EvalRecord, Problem
from capo_megatron.warmup import Say

_GPU_GIB = 80  # of an H100, for which `check` plans where no GPU tells its size
_TASK_PROBLEMS = 512  # that a task is evaluated on, unless a request says otherwise


class Accepted(NamedTuple):
    """A training run whose config has been found good, and of which nothing has been written yet."""

    model: Model
    data: Data
    algorithm: Algorithm


# --- training ---------------------------------------------------------------------------------------------------------


def run_training(config: RunConfig, say: Say) -> int:
    """Train as configured, on the ranks that were started; the step reached. `say` shows a line to the user."""
    _require_engine(config)
    accepted = accept(config, runtime.world_size())
    if _vllm_beside_trainer(config) and (gpu := gpu_here()) is not None:
        check_vllm(_plan(config, accepted.model, runtime.world_size()), gpu)
    with closing(build_reward(config.reward)) as reward, ranks(config) as team:
        reached = train_on(team, config, accepted, reward, say)
        team.barrier()  # the launcher ends the ranks that are left when one ends
        return reached


def train_on(team: Runtime, config: RunConfig, accepted: Accepted, reward: RewardFunction, say: Say) -> int:
    """Train what was accepted on ranks that stand ready; the step reached."""
    model, data, algorithm = accepted
    output, said = Path(config.output), _by_first_rank(say, team)
    store = DistCheckpointStore(output, team, config.checkpoint.keep)
    if (reached := store.latest()) is not None:
        left = max(0, config.train.steps - reached)
        rest = "1 step is" if left == 1 else f"{left or 'no'} steps are"
        said(f"{output}: step {reached} of {config.train.steps} is saved; {rest} left")
        if not left:
            return reached
    weights = model.weights(team, said)
    updates = config.train.steps * config.train.minibatches * config.train.epochs
    policy = model.policy(team, weights, updates, algorithm.reference_decay is not None)
    said(_describe(config, model, data, team.size))
    with closing(RunLog(output, config.log, dump(config), team, config.train.steps)) as log:
        parts = Parts(
            policy=policy,
            engine=model.engine(team),
            reward=reward,
            prompts=ShuffledSource(data.train, config.seed, config.data.shuffle),
            validation=data.validation,
            algorithm=algorithm,
            store=store,
            log=log,
            team=team,
            sampling=model.sampling,
            pad_id=model.pad_id,
            reference=model.reference_identity(weights),
            beside=team.beside() if config.rollout.async_steps else team,
        )
        reached = train(config, parts)
    if reached < config.train.steps:
        said(f"stopped at step {reached}/{config.train.steps}; the same command continues")
    return reached


def describe(config: RunConfig, world: int, gpu_gib: float | None = None) -> list[str]:
    """What a config means, as lines for a person: layout, batch arithmetic, memory. Starts no rank, writes nothing.

    `gpu_gib` is the size of the GPUs of the run; default: of those that are here, else of an H100, unless the vLLM that
    is installed is for CPUs. Raises what `run_training` would raise before it starts.
    """
    if gpu_gib is None:
        _require_device(config)
    model, data, _ = accept(config, world)
    if ":" in config.reward.kind:  # a user's function, which only a grading process imports
        build_reward(config.reward).close()
    plan = _plan(config, model, world)
    return [
        *describe_batch(config, world),
        f"problems      {len(data.train):,} for training, {len(data.validation):,} for validation"
        f"{_left_out(data.dropped)}",
        *plan.lines(),
        *(_vllms_share(plan, gpu_gib) if _vllm_beside_trainer(config) else []),
    ]


def _plan(config: RunConfig, model: Model, world: int) -> Plan:
    return Plan.of(
        model.shape,
        runtime.Layout.of(config.parallel, world),
        DTYPES[config.model.dtype],
        config.train,
        config.rollout,
        config.data.max_prompt_tokens + config.rollout.max_tokens,
        config.parallel.distributed_optimizer,
    )


def _vllm_beside_trainer(config: RunConfig) -> bool:
    return config.rollout.engine == "vllm" and config.rollout.placement == "colocated"


def _vllms_share(plan: Plan, gpu_gib: float | None) -> list[str]:
    gpu = gpu_here() if gpu_gib is None else int(gpu_gib * GIB)
    if gpu is None and not vllm.is_for_cpus():
        gpu = _GPU_GIB * GIB
    if gpu is not None:
        check_vllm(plan, gpu)
    return describe_vllm(plan, gpu)


def accept(config: RunConfig, world: int) -> Accepted:
    """What a training run needs before there are ranks. Raises for every mistake that can be found without them."""
    config.check(world)
    fp8.check_installed(config.precision)
    model = Model.accept(config)
    algorithm = build_algorithm(config.algorithm)
    if algorithm.top_k > model.shape.vocab_size:
        raise ConfigError(
            f"algorithm.top_k={algorithm.top_k}: the model has {model.shape.vocab_size} tokens. Lower it."
        )
    if config.rollout.async_steps and algorithm.reselect is not None:
        raise ConfigError(
            f"rollout.async_steps=1: {algorithm.name} chooses the next step's problems by the answers to this step's, "
            "which are known too late for that. Use rollout.async_steps=0, or options with which it chooses none "
            "(algorithm.refocus=false of codapo)."
        )
    if config.rollout.in_fp8 and not algorithm.corrects_sampler:
        warn_once(
            "rollout.vllm.weights=fp8: responses are sampled with rounded weights, and nothing corrects for that. Set "
            "algorithm.importance_cap (e.g. 2)."
        )
    data = load_data(config.data, model.tokenizer, config.seed, algorithm.instruction)
    _check_wordings(algorithm, data, config.data, model.tokenizer)
    output = Path(config.output)
    for folder in (output, *([model.base.directory] if model.base else [])):
        check_writable(folder)
    _check_base(model, output)
    saved = DistCheckpointStore(output, Solo()).check(model.shape)
    if saved is not None:
        prompts = ShuffledSource(data.train, config.seed, config.data.shuffle)
        reference = model.reference_identity()
        take_up(*saved, build_algorithm(config.algorithm), prompts, config.train.steps, reference)
    require_packages(config.log)
    model.check_weights()
    return Accepted(model, data, algorithm)


def _require_engine(config: RunConfig) -> None:
    """Raise ConfigError unless the engine can be started or reached from here, which `check` does not ask for."""
    if config.rollout.placement == "separate":
        channel.secret()
    elif config.rollout.engine == "vllm":
        vllm.check_installed()
    _require_device(config)


def _require_device(config: RunConfig) -> None:
    """Raise ConfigError unless the GPUs here have what the engine beside the trainer is to compute in."""
    if config.rollout.in_fp8 and config.rollout.placement == "colocated":
        vllm.check_fp8_device(versions.capability())


def _check_base(model: Model, output: Path) -> None:
    if model.base is None:
        return
    base, run = model.base.directory.resolve(), output.resolve()
    if base == run or run in base.parents:
        raise ConfigError(f"warmup.path: {base} lies in the run's own folder {run}. Choose a path outside of it.")


def _check_wordings(algorithm: Algorithm, data: Data, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if Signal.PERTURBED in algorithm.needs and not any(problem.perturbed for problem in data.train):
        kinds = "typo, typo" if one_token_per_character(tokenizer) else "typo, suffix, scenario"
        column = ", or data.perturbed_column to a list of texts" if config.task is None else ""
        raise ConfigError(
            f"algorithm.kind={algorithm.name}: it compares several wordings of each problem, and no problem has any. "
            f"Set data.perturbations=[{kinds}]{column}."
        )


@contextmanager
def ranks(config: RunConfig) -> Iterator[Runtime]:
    """The started ranks of a run."""
    team = runtime.start(config.parallel, config.seed)
    try:
        yield team
    finally:
        team.stop()


def _by_first_rank(say: Say, team: Runtime) -> Say:
    return say if team.rank == 0 else lambda _: None


def _describe(config: RunConfig, model: Model, data: Data, size: int) -> str:
    return (
        f"{config.algorithm.kind}: {len(data.train)} problems{_left_out(data.dropped)}, "
        f"{model.shape.num_hidden_layers} layers, {size} ranks, output {config.output}"
    )


def _left_out(dropped: Mapping[str, int]) -> str:
    named = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    return f" (left out: {named})" if named else ""


# --- sampling and evaluation ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingRequest:
    """What to sample."""

    questions: tuple[str, ...] = ()  # problems' texts, before the template; default: held-out problems
    problems: int = 4  # at most so many held-out problems
    samples: int = 1  # per problem
    base: bool = False  # by the model before training
    step: int | None = None  # by which checkpoint; default: the latest


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate beyond what the config says."""

    samples: int | None = None  # per problem; default: eval.samples
    problems: int | None = None  # at most so many
    base: bool = False  # the model before training
    step: int | None = None  # which checkpoint; default: the latest
    benchmarks: tuple[str, ...] = ()  # problem files instead of the run's own held-out problems
    records: Path | None = None  # where to write; default: eval/ in the run's folder
    name: str | None = None  # of the model in the records; default: "base", or the algorithm


def run_sampling(config: RunConfig, request: SamplingRequest, say: Say) -> None:
    """Show responses to questions or held-out problems."""
    config.check(runtime.world_size(), training=False)
    _require_engine(config)
    model = Model.accept(config)
    found = (
        _asked(config, model, request.questions) if request.questions else _held_out(config, model, request.problems)
    )
    if not found:
        raise DataError("sample: no problems. Give one with --prompt, or set data.task or data.validation.")
    with ranks(config) as team:
        said = _by_first_rank(say, team)
        engine = model.base_engine(team, said) if request.base else model.trained_engine(team, request.step)[0]
        mine = [found[index] for index in share_of(len(found), engine.share)]
        parts = gather_or_raise(team, lambda: (engine.share, engine.generate(mine, request.samples, model.sampling)))
        groups = [group for _, part in sorted(dict(parts).items()) for group in part]  # ranks may have the same share
        for problem, group in zip(found, groups, strict=True):
            for sample in group:
                said(_printable(f"{problem.prompt}\n-> {sample.text}{' ...' if sample.truncated else ''}\n"))


def _printable(text: str) -> str:
    """What a model wrote, without the power to command a terminal."""
    return "".join(mark if mark.isprintable() or mark in "\n\t" else repr(mark)[1:-1] for mark in text)


def run_evaluation(config: RunConfig, request: EvaluationRequest, say: Say) -> Path:
    """Sample and grade held-out problems, write the records and show accuracy and calibration; the records' file."""
    config.check(runtime.world_size(), training=False)
    _require_engine(config)
    model = Model.accept(config)
    problems, left_out = _evaluation_problems(config, model, request)
    samples = request.samples or config.eval.samples
    if config.eval.temperature == 0 and samples > 1:
        raise ConfigError(
            f"eval.temperature=0: {samples} responses to a problem would all be equal. Ask for one: --n 1."
        )
    folder = Path(config.output) / "eval"
    if request.records is not None and request.records.is_dir():
        raise ConfigError(f"--output {request.records}: is a folder. Name a file in it.")
    check_writable(request.records.parent if request.records else folder)
    with closing(build_reward(config.reward)) as reward, ranks(config) as team:
        said = _by_first_rank(say, team)
        engine, step = (model.base_engine(team, said), 0) if request.base else model.trained_engine(team, request.step)
        path = request.records or folder / ("base.jsonl" if request.base else f"step_{step:06d}.jsonl")
        unfinished = Unfinished(path, _what_is_sampled(config, request, problems, samples, engine))
        earlier: list[list[EvalRecord]] = gather_or_raise(team, lambda: unfinished.parts() if team.rank == 0 else [])[0]
        if earlier:
            said(f"eval: {sum(map(len, earlier)):,} responses are there from an evaluation that was interrupted")
        records = evaluate(
            engine,
            reward,
            problems,
            samples,
            replace(model.sampling, temperature=config.eval.temperature),
            team,
            model.pad_id,
            model=request.name or ("base" if request.base else config.algorithm.kind),
            step=step,
            read=build_algorithm(config.algorithm).read,
            earlier=earlier,
            keep=lambda number, part: on_first_rank(team, lambda: unfinished.add(number, part)),
        )
        on_first_rank(team, lambda: _save_records(path, records))
        on_first_rank(team, unfinished.remove)
        if left_out:
            said(f"{len(problems)} questions{_left_out(left_out)}")
        summary = "  ".join(f"{name} {value:.4g}" for name, value in summarise(records).items())
        said(f"{summary}\nrecords: {path}")
        return path


def _what_is_sampled(
    config: RunConfig, request: EvaluationRequest, problems: Sequence[Problem], samples: int, engine: RolloutEngine
) -> str:
    """A text that differs wherever an evaluation's records do, rounding by the layout apart."""
    grader = Path(config.reward.kind.rpartition(":")[0])  # a user's function in a file
    source = grader.read_text(errors="replace") if grader.suffix == ".py" and grader.is_file() else ""
    text = dump(replace(config, parallel=type(config.parallel)()))
    asked = [(problem.id, problem.prompt, problem.answer) for problem in problems]
    return repr((text, source, request.base, request.name, samples, sorted(engine.sketches().items()), asked))


def _save_records(path: Path, records: Sequence[EvalRecord]) -> None:
    make_folder(path.parent)
    write_records(path, records)


def _asked(config: RunConfig, model: Model, questions: Sequence[str]) -> list[Problem]:
    template = load_template(config.data.template, config.data.system_prompt, model.tokenizer, _instruction(config))
    prompts = [template(question) for question in questions]
    return [
        Problem(f"prompt-{index}", prompt, tuple(ids), "")
        for index, (prompt, ids) in enumerate(zip(prompts, encode(model.tokenizer, prompts), strict=True), start=1)
    ]


def _instruction(config: RunConfig) -> str | None:
    return build_algorithm(config.algorithm).instruction


def _held_out(config: RunConfig, model: Model, count: int | None) -> list[Problem]:
    """Up to `count` problems that no training sees: a task's evaluation problems, or validation problems of files."""
    data = config.data
    if data.task is not None:
        task = make_task(data, model.tokenizer, config.seed, _instruction(config))
        return task.evaluation_problems(count or _TASK_PROBLEMS)
    if data.validation:
        return load_problems(data.validation, data, model.tokenizer, _instruction(config))[0][:count]
    if not data.train:
        return []
    return load_data(data, model.tokenizer, config.seed, _instruction(config)).validation[:count]


def _evaluation_problems(
    config: RunConfig, model: Model, request: EvaluationRequest
) -> tuple[list[Problem], Mapping[str, int]]:
    """The problems to evaluate on, and how many of the benchmarks' were left out and why."""
    left_out: Mapping[str, int] = {}
    if request.benchmarks:
        found, left_out = load_problems(
            request.benchmarks, config.data, model.tokenizer, _instruction(config), published=True
        )
        problems = found[: request.problems]
    else:
        problems = _held_out(config, model, request.problems)
    if not problems:
        raise DataError("eval: no problems. Name files with --benchmark, or set data.task or data.validation.")
    return problems, left_out
