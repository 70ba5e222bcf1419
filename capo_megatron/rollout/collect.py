"""A step's rollouts: every rank samples and grades its share of the problems, and all ranks end up with the whole."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from capo_megatron.agreement import gather_or_raise
from capo_megatron.errors import RewardError, RolloutError
from capo_megatron.seams import ResponseReader, RewardFunction, RolloutEngine, SamplingParams, Team
from capo_megatron.types import Grade, Problem, Reading, RolloutBatch, Sample, Segment, Verdict

_Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Collected:
    """Responses with what the tensors do not hold of them. Row for row alike."""

    batch: RolloutBatch
    texts: list[str]
    grades: list[Grade]
    sampled: int  # response tokens, with those of rows that were left out since
    offered: int  # problems sampled, with those that were left out since
    rounds: int  # of sampling
    seconds: Mapping[str, float]  # of "generate" and "grade", on the rank that took longest
    dropped: int = 0  # responses on which the engine gave up

    def metrics(self) -> dict[str, float]:
        """What is worth logging and not in `batch`.

        Shares of the verdicts among the rows kept; rounds of sampling and the share of problems rejected in them;
        how many responses the engine gave up on; seconds and tokens/s of generating and grading, with rejected rows.
        """
        shares = Counter(grade.verdict for grade in self.grades)
        found = {f"verdict/{verdict.value}": shares[verdict] / max(1, len(self.grades)) for verdict in Verdict}
        found["rollout/rounds"] = float(self.rounds)
        found["rollout/dropped"] = float(self.dropped)
        found["rollout/rejected"] = 1 - len(self.batch.problems) / max(1, self.offered)
        for phase, name in (("generate", "generate"), ("reward", "grade")):
            found[f"seconds/{phase}"] = self.seconds[name]
            found[f"tokens_per_second/{phase}"] = self.sampled / max(self.seconds[name], 1e-9)
        return found

    def group(self, index: int) -> RolloutBatch:
        """The rows of one problem."""
        return self.batch.slice(torch.nonzero(self.batch.group == index).flatten())

    def select(self, groups: Sequence[int]) -> Collected:
        """Only these problems' rows, in this order; `problems` and `group` are renumbered."""
        rows = [torch.nonzero(self.batch.group == group).flatten() for group in groups]
        index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
        number = torch.arange(len(groups)).repeat_interleave(
            torch.tensor([len(part) for part in rows], dtype=torch.int64)
        )
        problems = tuple(self.batch.problems[group] for group in groups)
        batch = replace(self.batch.slice(index), problems=problems, group=number)
        texts, grades = [self.texts[row] for row in index.tolist()], [self.grades[row] for row in index.tolist()]
        return replace(self, batch=batch, texts=texts, grades=grades)

    @staticmethod
    def join(parts: Sequence[Collected], pad_id: int) -> Collected:
        """All rows of the parts, one after the other, padded to the longest response among them."""
        if len(parts) == 1:
            return parts[0]
        batches = [part.batch for part in parts]
        versions = {batch.policy_version for batch in batches}
        if len(versions) > 1:
            raise RolloutError(f"rollouts of policy versions {sorted(versions)} cannot be joined: sample them again.")
        return Collected(
            batch=_joined(batches, pad_id),
            texts=[text for part in parts for text in part.texts],
            grades=[grade for part in parts for grade in part.grades],
            sampled=sum(part.sampled for part in parts),
            offered=sum(part.offered for part in parts),
            rounds=sum(part.rounds for part in parts),
            seconds={name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds},
            dropped=sum(part.dropped for part in parts),
        )


def collect(
    engine: RolloutEngine,
    reward: RewardFunction,
    problems: Sequence[Problem],
    samples: int,
    params: SamplingParams,
    team: Team,
    pad_id: int,
    version: int | None = None,
    read: ResponseReader | None = None,
    progress: float = 0.0,
    max_dropped: float = 0.0,
) -> Collected:
    """`samples` graded responses to each problem, the same on every rank. Collective: all ranks pass the same problems.

    Each rank samples and grades its engine's share (a contiguous, balanced part of the problems). A problem that occurs
    several times gets different responses each time. What `read` finds in a response becomes rewards and segments,
    and decides which part of it is graded. Groups have fewer rows where the engine gave up on a response, and a problem
    without any is left out.
    Raises, on every rank, what one of them raises; RolloutError if the shares leave a problem out, the engine gave up
    on more than a share `max_dropped` of the responses, or the engines' weights are of different versions or of another
    than `version`; RewardError if grades cannot be put together.
    """
    parts = gather_or_raise(team, lambda: _take_share(engine, reward, problems, samples, params, version, read))
    _check_versions(parts)
    whole = _in_order(parts)
    sizes = np.concatenate([part.sizes for part in whole])
    dropped = len(problems) * samples - int(sizes.sum())
    _check_dropped(dropped, len(problems) * samples, max_dropped)
    found = Collected(
        batch=_batch(problems, sizes, whole, pad_id, parts[0].version, progress),
        texts=[text for part in whole for text in part.texts],
        grades=[grade for part in whole for grade in part.grades],
        sampled=sum(len(part.ids) for part in whole),
        offered=len(problems),
        rounds=1,
        seconds={name: max(part.seconds[name] for part in parts) for name in parts[0].seconds},
        dropped=dropped,
    )
    return found if sizes.all() else found.select(np.flatnonzero(sizes).tolist())


def share_of(count: int, share: tuple[int, int]) -> range:
    """The indices, of `count` problems, in share (index, number of shares): contiguous, sizes differ by at most 1."""
    index, shares = share
    if not 0 <= index < shares:
        raise RolloutError(f"rollout engine: share {share}, the index must be from 0 to {shares - 1}.")
    return range(count * index // shares, count * (index + 1) // shares)


def align(sequences: Sequence[tuple[_Ids, _Ids]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(tokens [N, S] int64, response_mask [N, T] bool) of (prompt ids, response ids), by the rule in `types`."""
    width = max((len(prompt) + len(response) for prompt, response in sequences), default=1)
    tokens = np.full((len(sequences), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(sequences), width - 1), dtype=bool)
    for row, (prompt, response) in enumerate(sequences):
        end = len(prompt) + len(response)
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : end] = response
        mask[row, len(prompt) - 1 : end - 1] = True
    return torch.from_numpy(tokens), torch.from_numpy(mask)


# --- one rank's part --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """What one rank sampled, flat, as it travels to the others."""

    share: tuple[int, int]
    version: int
    sizes: np.ndarray  # [problems] int64: responses to each, n in all
    lengths: np.ndarray  # [n] int64
    ids: np.ndarray  # [sum of lengths] int32
    logprobs: np.ndarray  # [sum of lengths] float32
    truncated: np.ndarray  # [n] bool
    texts: list[str]
    grades: list[Grade]
    readings: list[Reading]  # empty where nothing is read
    seconds: dict[str, float]


def _take_share(
    engine: RolloutEngine,
    reward: RewardFunction,
    problems: Sequence[Problem],
    samples: int,
    params: SamplingParams,
    version: int | None,
    read: ResponseReader | None,
) -> _Part:
    """Sample and grade this rank's share. Raises RolloutError or RewardError where a contract is broken."""
    if version is not None and engine.version != version:
        raise RolloutError(
            f"rollout engine: it holds policy version {engine.version}, the policy is at {version}: the refit did not "
            "run. Call load_weights after every optimizer step."
        )
    mine, held = share_of(len(problems), engine.share), engine.version
    named = _distinct(problems)
    started = time.perf_counter()
    groups = engine.generate([named[index] for index in mine], samples, params)
    generated = time.perf_counter()
    found = [sample for group in groups for sample in group]
    if len(groups) != len(mine) or any(len(group) > samples for group in groups):
        raise RolloutError(f"rollout engine: {len(found)} responses to {len(mine)} problems x {samples} samples.")
    asked = [problems[index] for index, group in zip(mine, groups, strict=True) for _ in group]
    _check_samples(asked, found, held)
    readings = [read(sample.ids, sample.text, engine.decode) for sample in found] if read else []
    answers = [reading.answer for reading in readings] if read else [None] * len(found)
    graded = [sample.text if part is None else part for sample, part in zip(found, answers, strict=True)]
    grades = list(reward.grade(asked, graded))
    if len(grades) != len(asked):
        raise RewardError(f"reward function: {len(grades)} grades for {len(asked)} responses. One each is needed.")
    return _Part(
        share=engine.share,
        version=held,
        sizes=np.array([len(group) for group in groups], dtype=np.int64),
        lengths=np.array([len(sample.ids) for sample in found], dtype=np.int64),
        ids=np.array([token for sample in found for token in sample.ids], dtype=np.int32),
        logprobs=np.array([value for sample in found for value in sample.logprobs], dtype=np.float32),
        truncated=np.array([sample.truncated for sample in found], dtype=bool),
        texts=[sample.text for sample in found],
        grades=grades,
        readings=readings,
        seconds={"generate": generated - started, "grade": time.perf_counter() - generated},
    )


def _check_samples(problems: Sequence[Problem], samples: Sequence[Sample], version: int) -> None:
    if others := sorted({sample.version for sample in samples} - {version}):
        raise RolloutError(
            f"rollout engine: it was to sample by policy version {version}, and responses are by {others}. Load no "
            "weights while it samples."
        )
    for problem, sample in zip(problems, samples, strict=True):
        if len(sample.logprobs) != len(sample.ids) or not all(map(math.isfinite, sample.logprobs)):
            raise RolloutError(
                f"rollout engine: problem {problem.id!r}: {len(sample.logprobs)} log-probs for {len(sample.ids)} "
                "tokens, or one of them is not finite. Each token needs the log-prob with which it was sampled."
            )


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """The problems with ids that occur once: the id decides the sampled tokens, so repeats get a number."""
    seen: Counter[str] = Counter()
    found = []
    for problem in problems:
        found.append(replace(problem, id=f"{problem.id}#{seen[problem.id]}") if seen[problem.id] else problem)
        seen[problem.id] += 1
    return found


# --- the whole --------------------------------------------------------------------------------------------------------


def _check_versions(parts: Sequence[_Part]) -> None:
    held = [part.version for part in parts]
    if len(set(held)) > 1:
        raise RolloutError(f"rollout engines hold weights of versions {held} on ranks 0, 1, ...: refit all of them.")


def _check_dropped(dropped: int, wanted: int, allowed: float) -> None:
    if dropped > allowed * wanted:
        raise RolloutError(
            f"rollout.max_dropped={allowed:g}: the engine gave up on {dropped} of {wanted} responses, also when they "
            "were asked for again (rollout.retries). Look at its messages (VLLM_LOGGING_LEVEL=INFO) and its memory."
        )


def _in_order(parts: Sequence[_Part]) -> list[_Part]:
    """One part per share, in the order of the problems. Ranks that answer for the same share count once."""
    by_share: dict[tuple[int, int], _Part] = {}
    for part in parts:
        by_share.setdefault(part.share, part)
    shares = parts[0].share[1]
    if sorted(by_share) != [(index, shares) for index in range(shares)]:
        raise RolloutError(f"rollout engines: shares {sorted(by_share)} are no whole. Give every share to a rank.")
    return [by_share[index, shares] for index in range(shares)]


def _batch(
    problems: Sequence[Problem], sizes: np.ndarray, parts: Sequence[_Part], pad_id: int, version: int, progress: float
) -> RolloutBatch:
    responses = [ids for part in parts for ids in np.split(part.ids, np.cumsum(part.lengths)[:-1]) if len(part.lengths)]
    asked = [problem for problem, size in zip(problems, sizes, strict=True) for _ in range(size)]
    grades = [grade for part in parts for grade in part.grades]
    pairs = [(problem.prompt_ids, response) for problem, response in zip(asked, responses, strict=True)]
    tokens, mask = align(pairs, pad_id)
    logprobs = torch.zeros(mask.shape, dtype=torch.float32)
    logprobs[mask] = torch.from_numpy(np.concatenate([part.logprobs for part in parts]))
    readings = [reading for part in parts for reading in part.readings]
    return RolloutBatch(
        problems=tuple(problems),
        tokens=tokens,
        response_mask=mask,
        segment=_segments(mask, readings),
        group=torch.arange(len(problems)).repeat_interleave(torch.from_numpy(sizes)),
        rewards=_rewards(asked, grades) | _read_values(readings),
        gradable=torch.tensor([grade.verdict.gradable for grade in grades], dtype=torch.bool),
        truncated=torch.from_numpy(np.concatenate([part.truncated for part in parts])),
        sampler_logprobs=logprobs,
        policy_version=version,
        progress=progress,
    )


def _segments(mask: Tensor, readings: Sequence[Reading]) -> Tensor:
    """[N, T] uint8: reasoning, but from where a reading says that another segment starts."""
    segment = mask.to(torch.uint8) * Segment.REASONING
    first = mask.int().argmax(dim=1).tolist()
    for row, reading in enumerate(readings):
        for start, kind in sorted(reading.starts.items()):
            segment[row, first[row] + start :] = kind
    return segment * mask


def _read_values(readings: Sequence[Reading]) -> dict[str, Tensor]:
    """Name -> [N] float32 of what was read from every response."""
    names = readings[0].values if readings else {}
    return {name: torch.tensor([float(reading.values[name]) for reading in readings]) for name in names}


def _rewards(problems: Sequence[Problem], grades: Sequence[Grade]) -> dict[str, Tensor]:
    """Name -> [N] float32: "reward", "correct" and every extra that gradable responses earned; 0.0 where not gradable.

    Raises RewardError if gradable grades name different extras, or a value is not finite.
    """
    names: set[str] | None = None
    for problem, grade in zip(problems, grades, strict=True):
        if not grade.verdict.gradable:
            continue
        names = set(grade.extra) if names is None else names
        if set(grade.extra) != names or names & {"reward", "correct"}:
            raise RewardError(
                f"problem {problem.id!r}: the grade has extras {sorted(grade.extra)}, others have {sorted(names)}. "
                'Every grade needs the same names, none of them "reward" or "correct".'
            )
        if not all(math.isfinite(value) for value in (grade.reward, *grade.extra.values())):
            raise RewardError(f"problem {problem.id!r}: reward {grade.reward}, extras {dict(grade.extra)}: not finite.")
    columns = {
        "reward": [grade.reward if grade.verdict.gradable else 0.0 for grade in grades],
        "correct": [float(grade.verdict is Verdict.CORRECT) for grade in grades],
    }
    for name in sorted(names or ()):
        columns[name] = [float(grade.extra[name]) if grade.verdict.gradable else 0.0 for grade in grades]
    return {name: torch.tensor(column, dtype=torch.float32) for name, column in columns.items()}


def _joined(batches: Sequence[RolloutBatch], pad_id: int) -> RolloutBatch:
    targets = max(batch.response_mask.shape[1] for batch in batches)
    names = {name for batch in batches for name in batch.rewards}
    starts = np.cumsum([0, *(len(batch.problems) for batch in batches)]).tolist()

    def column(name: str, fill: float = 0) -> Tensor:
        parts = [getattr(batch, name) for batch in batches]
        width = targets + 1 if name == "tokens" else targets
        padded = [
            torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) if part.ndim > 1 else part
            for part in parts
        ]
        return torch.cat(padded)

    return RolloutBatch(
        problems=tuple(problem for batch in batches for problem in batch.problems),
        tokens=column("tokens", pad_id),
        response_mask=column("response_mask"),
        segment=column("segment"),
        group=torch.cat([batch.group + start for batch, start in zip(batches, starts, strict=False)]),
        # A part in which nothing was gradable has no extras.
        rewards={
            name: torch.cat([batch.rewards.get(name, torch.zeros(len(batch))) for batch in batches]) for name in names
        },
        gradable=column("gradable"),
        truncated=column("truncated"),
        sampler_logprobs=column("sampler_logprobs"),
        policy_version=batches[0].policy_version,
        progress=batches[0].progress,
    )
