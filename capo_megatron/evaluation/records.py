"""Evaluation records: one JSON line per graded response (`types.EvalRecord`), and the numbers they add up to.

    question, benchmark, sample, model, step    what was asked, which of its samples this is, and who answered
    prompt, response, extracted, answer         texts; `extracted` null where no answer could be read
    correct, verdict                            what the grader says; correct is true iff the verdict is "correct"
    tokens, truncated, logprob_sum              length with the end token; nats at temperature 1, null if unknown
    lowest_logprobs, stated_confidence          optional, since schema 2; see `types.EvalRecord`
    schema                                      2; files of schema 1 are read as well

What counts where:

    verdict       accuracy, pass@n   AUC, log-probs, Brier, ECE
    correct       right              yes, if the response has a token
    wrong         wrong              yes, if the response has a token
    timeout       wrong              no: nobody knows
    unparseable   left out           no: the reference answer cannot be read
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capo_megatron.errors import DataError
from capo_megatron.evaluation.calibration import (
    auc_mean,
    brier,
    calibration_errors,
    mean_at_k,
    pass_at_k,
    pooled_auc,
)
from capo_megatron.runlog import each_row, to_json, write_text
from capo_megatron.types import EvalRecord, Verdict

SCHEMAS = (1, 2)  # that can be read; `EvalRecord.schema` is the one that is written
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "str | None": (str, type(None)),
    "float | None": (int, float, type(None)),
    "tuple[float, ...] | None": (list, type(None)),
}
_OPTIONAL = ("lowest_logprobs", "stated_confidence")


def write_records(path: Path, records: Iterable[EvalRecord]) -> None:
    """Replace `path` by these records, one JSON object a line; an absent log-prob is null. Raises CapoError."""
    write_text(path, "".join(f"{to_line(record)}\n" for record in records))


def to_line(record: EvalRecord) -> str:
    """The JSON of one record; optional fields that it lacks are left out."""
    row = {spec.name: getattr(record, spec.name) for spec in fields(EvalRecord)}
    return to_json({name: value for name, value in row.items() if value is not None or name not in _OPTIONAL})


def read_records(path: Path) -> list[EvalRecord]:
    """The records of a file. Raises DataError that names file and record if one does not fit the schema."""
    records = list(each_record(path))
    if not records:
        raise DataError(f"{path}: no records in it. Run an evaluation that writes some.")
    return records


def each_record(path: Path) -> Iterator[EvalRecord]:
    """The records of a file, one at a time. Raises what `read_records` raises, but for an empty file."""
    for number, row in enumerate(each_row(path), start=1):
        yield parse_record(row, f"{path}: record {number}")


def parse_record(row: dict[str, Any], where: str) -> EvalRecord:
    """One record from its JSON. Raises DataError that begins with `where` if it does not fit the schema."""
    if row.get("schema", SCHEMAS[0]) not in SCHEMAS:
        allowed = " or ".join(map(str, SCHEMAS))
        raise DataError(f"{where}: schema {row['schema']!r}, expected {allowed}. It was written by another version.")
    values: dict[str, Any] = {}
    for spec in fields(EvalRecord):
        if spec.name not in row and spec.default is MISSING:
            raise DataError(f"{where}: {spec.name!r} is missing, found {', '.join(row)}.")
        value = row.get(spec.name, spec.default)
        if spec.name == "logprob_sum" and value is None:
            value = math.nan
        numbers = not isinstance(value, list) or all(type(item) in (int, float) for item in value)
        fits = isinstance(value, _TYPES[str(spec.type)]) and isinstance(value, bool) == (spec.type == "bool")
        if not (fits and numbers):
            raise DataError(f"{where}: {spec.name}={value!r}, expected {spec.type}.")
        values[spec.name] = tuple(value) if isinstance(value, list) else value
    return EvalRecord(**values)


@dataclass(frozen=True)
class Columns:
    """Records as arrays, without those whose reference answer cannot be read."""

    question: NDArray[np.str_]  # with its benchmark, so that equal ids of two benchmarks stay apart
    correct: NDArray[np.bool_]
    score: NDArray[np.float64]  # mean log-prob per token, nats; NaN where there is no verdict or no token
    right_by_question: NDArray[np.int64]  # [questions], in the order of the sorted questions
    samples_by_question: NDArray[np.int64]

    @staticmethod
    def of(records: Sequence[EvalRecord]) -> Columns:
        """The columns of some records. Raises DataError if there are none, or one occurs twice."""
        if not records:
            raise DataError("evaluation: no records to summarise.")
        _refuse_duplicates(records)
        kept = [record for record in records if record.verdict != Verdict.UNPARSEABLE.value]
        question = np.array([f"{record.benchmark}\0{record.question}" for record in kept], dtype=str)
        correct = np.array([record.correct for record in kept], dtype=bool)
        _, index = np.unique(question, return_inverse=True)
        counts = np.bincount(index)
        right = np.bincount(index, correct, len(counts)).astype(np.int64)
        score = np.array([_mean_logprob(record) for record in kept], dtype=np.float64)
        return Columns(question, correct, score, right, counts)

    @property
    def samples(self) -> int:
        """Samples per question, of the question that has fewest."""
        return int(self.samples_by_question.min()) if len(self.samples_by_question) else 0


def _refuse_duplicates(records: Sequence[EvalRecord]) -> None:
    seen: set[tuple[str, str, int]] = set()
    for record in records:
        key = (record.benchmark, record.question, record.sample)
        if key in seen:
            raise DataError(
                f"evaluation: question {record.question!r} of {record.benchmark!r} has sample {record.sample} twice. "
                "Keep one model and step per records file."
            )
        seen.add(key)


def _mean_logprob(record: EvalRecord) -> float:
    judged = record.verdict in (Verdict.CORRECT.value, Verdict.WRONG.value)
    return record.logprob_sum / record.tokens if judged and record.tokens > 0 else math.nan


def summarise(records: Sequence[EvalRecord]) -> dict[str, float]:
    """Name -> value over the records of one model. What is undefined (no mixed question, ...) is NaN.

        accuracy, accuracy_se                   mean@n over questions; standard error over questions
        pass_at_n                               share of questions solved in n tries, n = samples
        auc_mean, auc_mean_se, auc_questions    AUC of the mean log-prob within questions with right and wrong answers
        auc_pooled                              the same over all responses together
        logprob_mean, logprob_correct, logprob_wrong     of responses, nats per token
        brier, ece                              of exp(mean log-prob)
        tokens, truncated, unparseable, timeout          mean length; shares of all responses
        questions, samples

    Raises DataError if there are no records or one occurs twice.
    """
    columns = Columns.of(records)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN says it
        found = _accuracy(columns) | _calibration(columns)
    count = len(records)
    return found | {
        "tokens": sum(record.tokens for record in records) / count,
        "truncated": sum(record.truncated for record in records) / count,
        "unparseable": 1 - len(columns.correct) / count,
        "timeout": sum(record.verdict == Verdict.TIMEOUT.value for record in records) / count,
        "questions": float(len(columns.samples_by_question)),
        "samples": float(columns.samples),
    }


def _accuracy(columns: Columns) -> dict[str, float]:
    if not len(columns.correct):
        return {"accuracy": math.nan, "accuracy_se": math.nan, "pass_at_n": math.nan}
    right, samples = columns.right_by_question, columns.samples_by_question
    return {
        "accuracy": mean_at_k(columns.correct, columns.question),
        "accuracy_se": standard_error(right / samples),
        "pass_at_n": float(np.mean(pass_at_k(samples, right, columns.samples))),
    }


def _calibration(columns: Columns) -> dict[str, float]:
    score, correct = columns.score, columns.correct
    auc = auc_mean(score, correct, columns.question)
    confidence = np.exp(np.minimum(score, 0.0))  # rounding can lift a log-prob a hair above 0
    return {
        "auc_mean": auc.value,
        "auc_mean_se": standard_error(auc.per_question),
        "auc_questions": float(auc.n_valid),
        "auc_pooled": pooled_auc(score, correct),
        "logprob_mean": _mean(score),
        "logprob_correct": _mean(score[correct]),
        "logprob_wrong": _mean(score[~correct]),
        "brier": brier(confidence, correct),
        "ece": calibration_errors(confidence, correct)[0],
    }


def standard_error(per_question: NDArray[np.float64]) -> float:
    """Of the mean over the questions that have a value; NaN for fewer than two."""
    values = per_question[~np.isnan(per_question)]
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan
