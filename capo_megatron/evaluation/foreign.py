"""Records of responses that other programs sampled and graded: verl's dumps and lm-evaluation-harness's sample logs.

Neither holds log-probs, so accuracy, pass@k and majority vote can be had from them, and calibration only where a row
says more: a reward function's extra columns in verl (`logprob_sum` with `tokens`, or `stated_confidence`), or the
likelihoods of the choices in a multiple-choice task of the harness.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from capo_megatron.errors import DataError
from capo_megatron.runlog import each_row
from capo_megatron.types import EvalRecord, Verdict

Row = Mapping[str, Any]
_TOO_LARGE = 2**53  # for a column to hold exactly
_ENOUGH = 0.5  # a score or metric above it means correct: schemes are 1 and 0, or 1 and -1


class Numbering:
    """The running number of a question's samples, over all files that are read together."""

    def __init__(self) -> None:
        self._seen = Counter[Hashable]()

    def next(self, *question: Hashable) -> int:
        self._seen[question] += 1
        return self._seen[question] - 1


def reader_for(row: Row) -> Callable[[Path, Numbering], Iterator[EvalRecord]] | None:
    """What reads files whose first row is this one; None for records of our own, or of nobody that we know."""
    if {"input", "output", "score", "step"} <= row.keys():
        return read_verl
    if {"doc_id", "resps", "filtered_resps", "metrics"} <= row.keys():
        return read_harness
    return None


def read_verl(path: Path, numbering: Numbering) -> Iterator[EvalRecord]:
    """Records of `<step>.jsonl` in verl's `trainer.rollout_data_dir` or `validation_data_dir` (0.9.1).

    A question is its prompt text, a model the folder's name. Correct: `acc`, or `score` where there is none, above 0.5.
    """
    for number, row in enumerate(each_row(path), start=1):
        where = f"{path}: row {number}"
        step, prompt = _whole(row, "step", where), str(_have(row, "input", where))
        right = _number(row, "acc" if row.get("acc") is not None else "score", where) > _ENOUGH
        benchmark = str(row.get("data_source") or "verl")
        yield _record(
            question=prompt,
            benchmark=benchmark,
            sample=numbering.next(path.parent, step, benchmark, prompt),
            prompt=prompt,
            response=str(_have(row, "output", where)),
            extracted=_text_or_none(row.get("pred")),
            answer=str(row.get("gts")),
            right=right,
            tokens=_whole(row, "tokens", where) if row.get("tokens") is not None else 0,
            logprob_sum=_number(row, "logprob_sum", where) if row.get("logprob_sum") is not None else math.nan,
            truncated=bool(row.get("truncated", False)),
            model=path.resolve().parent.name,
            step=step,
            stated=_number(row, "stated_confidence", where) if row.get("stated_confidence") is not None else None,
        )


def read_harness(path: Path, numbering: Numbering) -> Iterator[EvalRecord]:
    """Records of `samples_<task>_<date>.jsonl` of lm-evaluation-harness's `--log_samples` (0.4.13).

    One record per row, of the response that the harness graded: with `repeats` above 1 and its default filter that is
    the first one. Files of several runs of a task are the samples of its questions: run it with another `--seed` each
    time. Benchmark: the task, and the filter behind a slash unless it is "none". Correct: the row's first metric above
    0.5. Multiple choice: the response is the likeliest choice, its confidence the softmax over all choices.
    """
    task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
    for number, row in enumerate(each_row(path), start=1):
        where = f"{path}: row {number}"
        question, kind = str(_have(row, "doc_id", where)), str(row.get("filter", "none"))
        benchmark = task if kind == "none" else f"{task}/{kind}"
        metrics = _have(row, "metrics", where)
        if not metrics:
            raise DataError(f"{where}: no metric. The task has to grade its responses, e.g. by exact_match.")
        response, extracted, stated = _answered(row, where)
        yield _record(
            question=question,
            benchmark=benchmark,
            sample=numbering.next(path.parent, benchmark, question),
            prompt=_prompt(row),
            response=response,
            extracted=extracted,
            answer=str(row.get("target")),
            right=_number(row, metrics[0], where) > _ENOUGH,
            tokens=0,
            logprob_sum=math.nan,
            truncated=False,
            model=path.resolve().parent.name,
            step=0,
            stated=stated,
        )


def _answered(row: Row, where: str) -> tuple[str, str | None, float | None]:
    """(response, extracted answer, confidence) of a row of the harness."""
    try:
        filtered = row["filtered_resps"]
        if _is_likelihood(filtered[0]):
            likelihoods = [float(choice[0]) for choice in filtered]
            best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
            top = likelihoods[best]
            return str(best), str(best), 1 / math.fsum(math.exp(value - top) for value in likelihoods)
        response, graded = row["resps"][0][0], filtered[0]
        graded = graded[0] if isinstance(graded, Sequence) and not isinstance(graded, str) else graded
        return str(response), None if graded in ("[invalid]", "") else str(graded), None
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: resps and filtered_resps are not as lm-evaluation-harness writes them.") from error


def _is_likelihood(choice: object) -> bool:
    """True for [log-prob, is greedy], which the harness writes as two strings."""
    return isinstance(choice, list) and len(choice) == 2 and choice[1] in ("True", "False")


def _prompt(row: Row) -> str:
    arguments = row.get("arguments")
    first = arguments.get("gen_args_0") if isinstance(arguments, dict) else None
    return str(first.get("arg_0", "")) if isinstance(first, dict) else ""


def _record(*, right: bool, stated: float | None, **known: Any) -> EvalRecord:
    verdict = Verdict.CORRECT if right else Verdict.WRONG
    return EvalRecord(correct=right, verdict=verdict.value, stated_confidence=stated, **known)


def _have(row: Row, name: str, where: str) -> Any:
    if row.get(name) is None:
        raise DataError(f"{where}: {name!r} is missing, found {', '.join(row)}.")
    return row[name]


def _number(row: Row, name: str, where: str) -> float:
    value = _have(row, name, where)
    if not isinstance(value, (int, float)) or not abs(value) < _TOO_LARGE:  # nor NaN
        raise DataError(f"{where}: {name}={value!r}, expected a number.")
    return float(value)


def _whole(row: Row, name: str, where: str) -> int:
    value = _number(row, name, where)
    if value != int(value):
        raise DataError(f"{where}: {name}={value!r}, expected a whole number.")
    return int(value)


def _text_or_none(value: object) -> str | None:
    return None if value in (None, "", "[INVALID]") else str(value)
