"""The training loop: sample, grade, score, estimate advantages, update, refit. Knows no backend and no algorithm."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from capo_megatron import diagnostics
from capo_megatron.agreement import gather_or_raise
from capo_megatron.config import RunConfig
from capo_megatron.errors import CheckpointError, RolloutError, TrainingError
from capo_megatron.evaluation.run import evaluate, summarise
from capo_megatron.notices import warn_once
from capo_megatron.rollout.ahead import Ahead, restored
from capo_megatron.rollout.collect import Collected, collect
from capo_megatron.rollout.perturbed import perturbed_logprobs
from capo_megatron.rollout.proof import Probe
from capo_megatron.runlog.log import RunLog
from capo_megatron.seams import (
    Algorithm,
    CheckpointStore,
    Policy,
    PromptSource,
    RewardFunction,
    RolloutEngine,
    SamplingParams,
    Signal,
    Team,
)
from capo_megatron.types import Problem, RolloutBatch, Signals, StepReport, TrainBatch
from capo_megatron.weights import blockwise


@dataclass(frozen=True)
class Parts:
    """Everything that takes part in a run, passed in whole."""

    policy: Policy
    engine: RolloutEngine
    reward: RewardFunction
    prompts: PromptSource
    validation: Sequence[Problem]
    algorithm: Algorithm
    store: CheckpointStore
    log: RunLog
    team: Team
    sampling: SamplingParams  # its seed is replaced by one of the run's seed and the step
    pad_id: int
    beside: Team  # the same ranks, for what a second thread gathers (rollout.async_steps)
    reference: str = ""  # which weights the frozen reference has; "" is not compared


def train(config: RunConfig, parts: Parts) -> int:
    """Train until `config.train.steps` or a signal to stop, resuming from the newest checkpoint; the step reached."""
    policy, log, team, algorithm = parts.policy, parts.log, parts.team, parts.algorithm
    step, ahead = _resume(config, parts)
    saved = step
    probe = Probe(
        config.rollout.probe_rows,
        config.probe_tolerance,
        config.rounding,
        blockwise.rounded if config.rollout.in_fp8 else iter,
    )
    skipped = 0
    gap = _refit(parts, probe)
    if step == 0 and config.eval.every and config.eval.at_start:
        log.step(0, _validate(config, parts, 0))
    with _stop_requested() as stopping, closing(ahead):
        while step < config.train.steps and not team.any(stopping.is_set()):
            with log.phase("rollout") as phase:
                rollout = ahead.take(step) or _sample(config, parts, team, step, policy.version)
                phase.tokens = rollout.sampled
            batch = rollout.batch
            lag = _lag(config, policy, batch)
            if not config.rollout.async_steps:
                parts.engine.sleep()
            elif step + 1 < config.train.steps:
                ahead.start(step + 1, partial(_sample, config, parts, parts.beside, step + 1, policy.version))
            with log.phase("score", tokens=int(batch.response_mask.sum())):
                signals = _score(policy, algorithm, rollout.batch, parts.pad_id)
            advantages, kept = _advantages(algorithm, rollout, signals)
            with log.phase("train", tokens=int(batch.response_mask.sum()) * config.train.epochs):
                whole = TrainBatch(batch, signals, advantages, torch.zeros_like(advantages))
                reports = [
                    policy.train_step(part, algorithm.loss, algorithm.loss_needs, algorithm.top_k)
                    for part in _mini_batches(config, algorithm, whole)
                ]
            skipped = _count_skipped(reports, skipped, config.train.max_skipped, log)
            if algorithm.reference_decay is not None:
                policy.update_reference(algorithm.reference_decay)
            step += 1
            metrics = {**diagnostics.describe(batch, signals, advantages, kept), **_summary(reports), **gap, **lag}
            metrics |= rollout.metrics() | algorithm.report()
            log.samples(step, rollout, signals, advantages)
            with log.phase("rollout"):  # nothing below may happen while the engine samples
                metrics |= ahead.finish()
            if algorithm.reselect and (again := algorithm.reselect(batch, signals)) is not None:
                parts.prompts.repeat([batch.problems[group] for group in again])
            with log.phase("refit", tokens=int(batch.response_mask.sum())):
                gap = _refit(parts, probe)
            if config.eval.every and (step % config.eval.every == 0 or step == config.train.steps):
                metrics |= _validate(config, parts, step)
            # Before it is saved: a run that is killed in between forgets the row and makes the step again.
            log.step(step, metrics)
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                with log.phase("checkpoint"):
                    saved = _save(config, parts, step, ahead)
        if saved != step:
            _save(config, parts, step, ahead)
    return step


# --- the phases -------------------------------------------------------------------------------------------------------


def _sample(config: RunConfig, parts: Parts, team: Team, step: int, version: int) -> Collected:
    """A step's rollouts by the weights of `version`. Groups that the algorithm rejects are replaced, within bounds."""
    wanted, keep = config.rollout.prompts, parts.algorithm.keep_group
    kept: list[Collected] = []
    for attempt in range(parts.algorithm.max_refills + 1):
        problems = parts.prompts.take(wanted - sum(len(part.batch.problems) for part in kept))
        params = _seeded(parts.sampling, config.seed, "rollout", step, attempt)
        found = collect(
            parts.engine,
            parts.reward,
            problems,
            config.rollout.samples,
            params,
            team,
            parts.pad_id,
            version=version,
            read=parts.algorithm.read,
            progress=step / config.train.steps,
            max_dropped=config.rollout.max_dropped,
        )
        kept.append(found if keep is None else found.select([g for g in range(len(problems)) if keep(found.group(g))]))
        if sum(len(part.batch.problems) for part in kept) == wanted:
            return Collected.join(kept, parts.pad_id)
    raise RolloutError(
        f"{parts.algorithm.name}: {sum(len(part.batch.problems) for part in kept)} of {wanted} groups after "
        f"{parts.algorithm.max_refills} rounds of replacement: nearly all are rejected (e.g. all right or all wrong). "
        "Use problems of fitting difficulty, more samples per problem, or a larger algorithm.max_refills."
    )


def _lag(config: RunConfig, policy: Policy, batch: RolloutBatch) -> dict[str, float]:
    """How many optimizer steps the weights that sampled are behind; logged where there may be any.

    Raises RolloutError if that is more than the steps of training that `rollout.async_steps` allows make.
    """
    lag = policy.version - batch.policy_version
    allowed = config.rollout.async_steps * config.train.minibatches * config.train.epochs
    if not 0 <= lag <= allowed:
        raise RolloutError(
            f"rollout.async_steps={config.rollout.async_steps}: the rollout is of policy version "
            f"{batch.policy_version}, the policy is at {policy.version}; at most {allowed} optimizer steps may lie "
            "between them. The refit did not run, or the rollout is of another run."
        )
    return {"rollout/lag": float(lag)} if config.rollout.async_steps else {}


def _score(policy: Policy, algorithm: Algorithm, batch: RolloutBatch, pad_id: int) -> Signals:
    """What the algorithm needs to know of the rollouts, by weights that no update has touched yet."""
    needs = algorithm.needs - algorithm.idle(batch)
    now = policy.score(batch, needs | {Signal.ENTROPY}, "policy", algorithm.top_k)
    reference = perturbed = None
    if Signal.REF_LOGPROBS in needs:
        reference = policy.score(batch, frozenset(), "reference").logprobs
    if Signal.PERTURBED in needs:
        perturbed = perturbed_logprobs(policy, batch, pad_id)
    return Signals(now.logprobs, reference, now.entropy, now.topk, perturbed)


def _advantages(algorithm: Algorithm, rollout: Collected, signals: Signals) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, T] advantages with every mask applied, [N, T] bool what the masks kept)."""
    kept = rollout.batch.response_mask.clone()
    for mask in algorithm.masks:
        kept &= mask(rollout.batch, signals)
    return algorithm.estimator(rollout.batch, signals) * kept, kept


def _mini_batches(config: RunConfig, algorithm: Algorithm, whole: TrainBatch) -> Iterator[TrainBatch]:
    """The step's rows in mini-batches of whole groups, `epochs` times, each with its own reduction weights."""
    groups = whole.rollouts.group
    size = -(-len(whole.rollouts.problems) // config.train.minibatches)
    for _ in range(config.train.epochs):
        for rows in (torch.nonzero(groups // size == part).flatten() for part in range(config.train.minibatches)):
            part = whole.slice(rows)
            weights = algorithm.reduction(part.rollouts)
            yield TrainBatch(part.rollouts, part.signals, part.advantages, weights)


def _refit(parts: Parts, probe: Probe) -> dict[str, float]:
    """Give the engine the policy's weights and prove that both now say the same; the measured gap."""
    parts.engine.wake()
    gather_or_raise(parts.team, lambda: parts.engine.load_weights(parts.policy.hf_weights(), parts.policy.version))
    return probe.prove(parts.engine, parts.policy, parts.prompts, parts.sampling, parts.team, parts.pad_id)


def _validate(config: RunConfig, parts: Parts, step: int) -> dict[str, float]:
    """Validation metrics. The seed does not depend on the step, so that steps are compared on common random numbers."""
    params = _seeded(parts.sampling, config.seed, "validation")
    params = replace(params, temperature=config.eval.temperature)
    with parts.log.phase("eval") as phase:
        records = evaluate(
            parts.engine,
            parts.reward,
            parts.validation,
            config.eval.samples,
            params,
            parts.team,
            parts.pad_id,
            model=parts.algorithm.name,
            step=step,
            read=parts.algorithm.read,
        )
        phase.tokens = sum(record.tokens for record in records)
    return {f"validation/{name}": value for name, value in summarise(records).items()}


# --- bookkeeping ------------------------------------------------------------------------------------------------------


def _resume(config: RunConfig, parts: Parts) -> tuple[int, Ahead]:
    """The step that the newest checkpoint reached (0 without one), and what had been sampled for the next one.

    The log begins only once the checkpoint has been accepted.
    """
    if config.rollout.async_steps and not parts.algorithm.corrects_sampler:
        warn_once(
            "rollout.async_steps=1: responses are of weights one step older than the policy, and nothing corrects for "
            "that. Set algorithm.importance_cap (e.g. 2)."
        )
    found = parts.store.load(parts.policy)
    if found is None:
        parts.log.resume_from(-1)
        return 0, Ahead()
    step, state = found
    take_up(step, state, parts.algorithm, parts.prompts, config.train.steps, parts.reference)
    rollout = None
    if state.get("ahead"):
        if config.rollout.async_steps:
            rollout = restored(state["ahead"], parts.store.tensors(step), parts.prompts)
        else:
            warn_once(
                f"rollout.async_steps=0: the checkpoint of step {step} has responses that were sampled ahead. They are "
                f"left out, and so are their {len(state['ahead']['problems'])} problems in this pass."
            )
    parts.log.resume_from(step)
    return step, Ahead(step, rollout)


def take_up(
    step: int,
    state: Mapping[str, Any],
    algorithm: Algorithm,
    prompts: PromptSource,
    steps: int,
    reference: str = "",
) -> None:
    """Bring algorithm and prompts to where a checkpoint's state left them, for a run of so many `steps`.

    Raises CheckpointError or DataError if it is of another algorithm, another reference, or other problems.
    """
    lacking = {"method", "prompts", "algorithm"} - state.keys()
    if lacking:
        raise CheckpointError(f"the checkpoint of step {step} lacks {sorted(lacking)}: no run of this program.")
    if state["method"] != algorithm.name:
        raise CheckpointError(
            f"algorithm.kind={algorithm.name}: the checkpoint of step {step} in this output was trained by "
            f"{state['method']}. Nothing was changed. Choose another output, or algorithm.kind={state['method']}."
        )
    _check_kind_of_reference(step, state, algorithm)
    prompts.load_state_dict(state["prompts"])
    algorithm.load_state_dict(state["algorithm"])
    _check_reference(step, state, algorithm, reference)
    spanned = state.get("steps", steps)
    if algorithm.scheduled and spanned != steps:
        warn_once(
            f"train.steps={steps}: the checkpoint of step {step} is of a run of {spanned} steps, over which a schedule "
            f"of {algorithm.name} stretches. It goes on at {step / steps:.0%} of the run instead of "
            f"{step / spanned:.0%}."
        )


def _check_kind_of_reference(step: int, state: Mapping[str, Any], algorithm: Algorithm) -> None:
    averaged = bool(state.get("averaged_reference", False))  # which the first checkpoints of this program do not say
    if averaged != (decay := algorithm.reference_decay is not None):
        option = f"algorithm.reference_decay={algorithm.reference_decay if decay else 'null'}"
        raise CheckpointError(
            f"{option}: the checkpoint of step {step} in this output has {'an averaged' if averaged else 'a fixed'} "
            f"reference: other options of {algorithm.name} trained it. Choose another output, or those options."
        )


def _check_reference(step: int, state: Mapping[str, Any], algorithm: Algorithm, reference: str) -> None:
    before = state.get("reference", "")
    read = Signal.REF_LOGPROBS in algorithm.needs and algorithm.reference_decay is None
    if read and before and reference and before != reference:
        raise CheckpointError(
            f"model.reference: the checkpoint of step {step} in this output was trained against other weights than "
            "those that are the reference now. Nothing was changed. Choose another output, or the former reference "
            "(by default the model that training starts from)."
        )


def _save(config: RunConfig, parts: Parts, step: int, ahead: Ahead) -> int:
    sampled, tensors = ahead.state()
    state = {
        "method": parts.algorithm.name,
        "steps": config.train.steps,
        "averaged_reference": parts.algorithm.reference_decay is not None,
        "reference": parts.reference,
        "prompts": parts.prompts.state_dict(),
        "algorithm": parts.algorithm.state_dict(),
    }
    if sampled:
        state["ahead"] = sampled
    parts.store.save(step, parts.policy, state, tensors)
    return step


def _seeded(params: SamplingParams, *parts: object) -> SamplingParams:
    """`params` with a seed that these parts decide, on every machine alike."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    return replace(params, seed=int.from_bytes(digest, "big"))


def _summary(reports: Sequence[StepReport]) -> dict[str, float]:
    """One step's optimizer steps as metrics: means, maxima where the name says so, and how many were skipped."""
    taken = [report for report in reports if report.skipped is None]
    found = {"train/skipped": float(len(reports) - len(taken)), "train/lr": reports[-1].lr}
    if not taken:
        return found
    found["train/loss"] = sum(report.loss for report in taken) / len(taken)
    found["train/grad_norm"] = sum(report.grad_norm for report in taken) / len(taken)
    for name in taken[0].metrics:
        values = [report.metrics[name] for report in taken]
        found[f"train/{name}"] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return found


def _count_skipped(reports: Sequence[StepReport], before: int, allowed: int, log: RunLog) -> int:
    """Optimizer steps skipped in a row up to now. Raises TrainingError when there are more than `allowed`."""
    for report in reports:
        if report.skipped is None:
            before = 0
            continue
        before += 1
        log.warn(f"optimizer step skipped: {report.skipped}")
        if before > allowed:
            raise TrainingError(
                f"train: {before} optimizer steps in a row had a {report.skipped}. The last checkpoint is intact. "
                "Lower train.lr, look at the problem or weight it names, or raise train.max_skipped."
            )
    return before


@contextmanager
def _stop_requested() -> Iterator[threading.Event]:
    """An event that SIGTERM, Ctrl-C or a closed terminal sets: the step under way is finished and saved.

    A second Ctrl-C interrupts at once. A signal that is ignored (nohup) stays so. Signals reach the main thread only.
    """
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def stop(number: int, _: object) -> None:
        if number == signal.SIGINT and interrupted.is_set():
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            interrupted.set()
        stopping.set()

    interrupted = threading.Event()
    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in heard}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
