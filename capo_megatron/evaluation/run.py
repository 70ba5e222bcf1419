"""Sample and grade problems into evaluation records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

from capo_megatron.agreement import gather_or_raise
from capo_megatron.errors import RolloutError
from capo_megatron.evaluation.comparison import Comparison, compare
from capo_megatron.evaluation.records import read_records, summarise, write_records
from capo_megatron.rollout.collect import Collected, collect, share_of
from capo_megatron.seams import ResponseReader, RewardFunction, RolloutEngine, SamplingParams, Team
from capo_megatron.types import EvalRecord, Problem, Verdict

__all__ = ["Comparison", "compare", "evaluate", "read_records", "rescore", "summarise", "write_records"]


def evaluate(
    engine: RolloutEngine,
    reward: RewardFunction,
    problems: Sequence[Problem],
    samples: int,
    params: SamplingParams,
    team: Team,
    pad_id: int,
    *,
    model: str,
    step: int,
    read: ResponseReader | None = None,
    chunk_rows: int = 4096,
    earlier: Sequence[Sequence[EvalRecord]] = (),
    keep: Callable[[int, Sequence[EvalRecord]], None] | None = None,
) -> list[EvalRecord]:
    """One record per response, problems in order with their `samples` siblings adjacent, the same on every rank.

    `logprob_sum` is at temperature 1 over the whole vocabulary, however the responses are sampled: where that differs
    from the sampler's log-probs, the engine scores the responses again. About `chunk_rows` responses are sampled at a
    time, which bounds the memory and changes no token. `read` is the algorithm's, see `collect`.
    `model` and `step` are written into the records. `keep` hears number and records of each chunk, on every rank; the
    first chunks need not be sampled again if they are given as `earlier`.

    Collective. Raises what `collect` raises.
    """
    records: list[EvalRecord] = []
    named, size = _named(problems), max(1, chunk_rows // samples)
    for number, start in enumerate(range(0, len(named), size)):
        if number < len(earlier):
            records += earlier[number]
            continue
        found = collect(engine, reward, named[start : start + size], samples, params, team, pad_id, read=read)
        sums = _logprob_sums(found, engine, params, team)
        part = list(_records(found, sums, model, step))
        if keep is not None:
            keep(number, part)
        records += part
    return records


def rescore(
    engine: RolloutEngine,
    records: Sequence[EvalRecord],
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    end: int,
    *,
    model: str,
    step: int,
) -> list[EvalRecord]:
    """The same responses with the log-probs that the engine's weights give them, for fixed-sample AUC.

    `encode` gives the token ids of texts, without special tokens, and `end` ends every response that is not truncated.
    A text may be cut into other tokens than were sampled: rescore the model that sampled, too. Verdicts stay.
    """
    prompts, responses = (encode([getattr(record, name) for record in records]) for name in ("prompt", "response"))
    ends = [[] if record.truncated else [end] for record in records]
    sequences = [(prompt, [*ids, *last]) for prompt, ids, last in zip(prompts, responses, ends, strict=True)]
    scored = engine.logprobs(sequences, 1.0)
    return [
        replace(record, logprob_sum=sum(values), tokens=len(values), lowest_logprobs=None, model=model, step=step)
        for record, values in zip(records, scored, strict=True)
    ]


def _named(problems: Sequence[Problem]) -> list[Problem]:
    """The problems with ids that are unique among all of them, since an id decides what is sampled.

    An id that is taken gets its benchmark's name before it, and a number behind it if that is taken, too.
    """
    taken: set[str] = set()
    found = []
    for problem in problems:
        choices = chain((problem.id, f"{problem.source}/{problem.id}"), (f"{problem.id}#{n}" for n in count(2)))
        name = next(choice for choice in choices if choice not in taken)
        taken.add(name)
        found.append(problem if name == problem.id else replace(problem, id=name))
    return found


def _records(found: Collected, sums: Sequence[float], model: str, step: int) -> Iterator[EvalRecord]:
    batch, numbers = found.batch, Counter[int]()
    tokens, groups, truncated = batch.response_mask.sum(dim=1).tolist(), batch.group.tolist(), batch.truncated.tolist()
    for row, (group, text, grade) in enumerate(zip(groups, found.texts, found.grades, strict=True)):
        problem = batch.problems[group]
        numbers[group] += 1
        yield EvalRecord(
            question=problem.id,
            benchmark=problem.source,
            sample=numbers[group] - 1,
            prompt=problem.prompt,
            response=text,
            extracted=grade.extracted,
            answer=problem.answer,
            correct=grade.verdict is Verdict.CORRECT,
            verdict=grade.verdict.value,
            tokens=tokens[row],
            logprob_sum=sums[row],
            truncated=truncated[row],
            model=model,
            step=step,
        )


def _logprob_sums(found: Collected, engine: RolloutEngine, params: SamplingParams, team: Team) -> list[float]:
    """[N] sum of each response's log-probs at temperature 1."""
    batch = found.batch
    if params.temperature == 1 and params.top_p == 1 and params.top_k == 0:
        return (batch.sampler_logprobs.double() * batch.response_mask).sum(dim=1).tolist()
    rows = len(found.texts)
    tokens, mask = batch.tokens, batch.response_mask
    mine = share_of(rows, engine.share)

    def score() -> dict[int, float]:
        sequences = []
        for row in mine:
            prompt = batch.problems[int(batch.group[row])].prompt_ids
            sequences.append((prompt, tokens[row, 1:][mask[row]].tolist()))
        return {row: sum(values) for row, values in zip(mine, engine.logprobs(sequences, 1.0), strict=True)}

    sums: dict[int, float] = {}
    for part in gather_or_raise(team, score):
        sums |= part
    if len(sums) != rows:
        raise RolloutError(f"rollout engine: {len(sums)} of {rows} responses were scored. Give every share to a rank.")
    return [sums[row] for row in range(rows)]
