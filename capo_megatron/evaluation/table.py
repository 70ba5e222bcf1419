"""Any number of records as columns, in bounded memory: a million take about 60 MB, since no text is kept.

Our own files are parsed by pyarrow. What it cannot take (a torn last line, half characters that a model emitted, a row
that fits no schema) is read again one record at a time, which is slower and says exactly what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.json
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from capo_megatron.errors import DataError
from capo_megatron.evaluation.foreign import Numbering, reader_for
from capo_megatron.evaluation.records import SCHEMAS, each_record
from capo_megatron.runlog import each_row
from capo_megatron.runlog.files import encode
from capo_megatron.types import EvalRecord, Verdict

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_BLOCK = 4 << 20  # bytes of a file that are parsed at a time; no record may be longer
_CHUNK = 20_000  # records of the slow path that become columns at a time
_ROUNDING = 1e-3  # nats by which a mean log-prob may lie above 0
_VERDICTS = [verdict.value for verdict in Verdict]
_REQUIRED = {
    "question": pyarrow.string(),
    "benchmark": pyarrow.string(),
    "sample": pyarrow.int64(),
    "response": pyarrow.string(),
    "correct": pyarrow.bool_(),
    "verdict": pyarrow.string(),
    "tokens": pyarrow.int64(),
    "truncated": pyarrow.bool_(),
    "model": pyarrow.string(),
    "step": pyarrow.int64(),
}
_NULLABLE = {
    "extracted": pyarrow.string(),
    "logprob_sum": pyarrow.float64(),
    "schema": pyarrow.int64(),
    "lowest_logprobs": pyarrow.list_(pyarrow.float64()),
    "stated_confidence": pyarrow.float64(),
}
_SCHEMA = pyarrow.schema([*_REQUIRED.items(), *_NULLABLE.items()])
_NAMED = ("benchmark", "question", "model")  # columns that hold an index into a list of names


@dataclass(frozen=True)
class Table:
    """N records as columns. The samples of a question of one model at one step are adjacent, and are a *unit*.

    What is unknown is NaN. `names` lists what the columns benchmark, question and model are indices of.
    """

    names: dict[str, tuple[str, ...]]
    benchmark: Ints
    question: Ints
    model: Ints
    step: Ints
    sample: Ints
    unit: Ints  # ascending, not dense after `take`
    correct: Bools
    verdict: Ints  # index into the values of Verdict
    truncated: Bools
    tokens: Ints
    logprob_sum: Floats  # nats
    lowest: Floats  # mean of the lowest log-probs that `read_table` was asked for
    stated: Floats  # in [0, 1]
    answer: NDArray[np.uint64]  # hash of what was extracted, 0 where nothing was
    completion: NDArray[np.uint64]  # hash of the response

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def starts(self) -> Ints:
        """[units] row at which each begins."""
        return np.flatnonzero(np.append(True, self.unit[1:] != self.unit[:-1])[: len(self)])

    def take(self, rows: slice | Ints | Bools) -> Table:
        """These rows, which must stay in order."""
        columns = {spec.name: getattr(self, spec.name)[rows] for spec in fields(self) if spec.name != "names"}
        return replace(self, **columns)

    def has(self, verdict: Verdict) -> Bools:
        """[N] the grader said this."""
        return self.verdict == _VERDICTS.index(verdict.value)

    def split(self, by: Sequence[str]) -> Iterator[tuple[dict[str, str | int], Table]]:
        """({column: value}, its rows) for every combination of the columns `by` (benchmark, step, model) there is."""
        starts = self.starts
        keys = np.stack([np.zeros(len(starts), dtype=int), *(getattr(self, name)[starts] for name in by)], axis=1)
        distinct, of_unit = np.unique(keys, axis=0, return_inverse=True)
        group = np.repeat(of_unit.ravel(), np.diff(starts, append=len(self)))
        order = np.argsort(group, kind="stable")
        edges = np.searchsorted(group[order], np.arange(len(distinct) + 1))
        if len(distinct) == 1:  # no copy
            yield self._named(by, distinct[0, 1:]), self
            return
        for key, start, end in zip(distinct[:, 1:], edges[:-1], edges[1:], strict=True):
            yield self._named(by, key), self.take(order[start:end])

    @property
    def graded(self) -> Table:
        """The rows whose reference answer can be read."""
        unparseable = self.has(Verdict.UNPARSEABLE)
        return self.take(~unparseable) if unparseable.any() else self

    def _named(self, by: Sequence[str], key: Ints) -> dict[str, str | int]:
        pairs = zip(by, key.tolist(), strict=True)
        return {name: self.names[name][value] if name in self.names else value for name, value in pairs}


def read_table(paths: Sequence[Path], lowest: int | None = None) -> Table:
    """The records of all files: ours, verl's dumps, sample logs of lm-evaluation-harness (told by the first row).

    `lowest`: of how many lowest log-probs `Table.lowest` is the mean; NaN without. Equal questions of different models
    or steps are different units. Raises DataError, which names file and record, for what is no record, for impossible
    values, for a file without any, and if a sample occurs twice.
    """
    columns = _Columns(lowest)
    numbering = Numbering()
    for path in paths:
        columns.begin(str(path))
        _read(path, columns, numbering)
        if columns.rows == columns.before:
            raise DataError(f"{path}: no records in it. Run an evaluation that writes some.")
    return columns.table()


def table_of(records: Iterable[EvalRecord], lowest: int | None = None) -> Table:
    """The table of records in memory. Raises what `read_table` raises."""
    columns = _Columns(lowest)
    columns.begin("records")
    for batch in _batches(records):
        columns.add(batch)
    if not columns.rows:
        raise DataError("evaluation: no records to measure.")
    return columns.table()


def _read(path: Path, columns: _Columns, numbering: Numbering) -> None:
    first = next(each_row(path), None)
    foreign = reader_for(first) if first is not None else None
    if foreign is not None:
        for batch in _batches(foreign(path, numbering)):
            columns.add(batch)
        return
    try:
        for batch in _parsed(path):
            columns.add(batch)
    except (pyarrow.ArrowException, _NoRecord):
        columns.restart()
        for batch in _batches(each_record(path)):
            columns.add(batch)


class _NoRecord(Exception):
    """Some row is no record; the slow path says which."""


def _parsed(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """What pyarrow makes of a file of ours."""
    if path.stat().st_size == 0:
        return
    options = pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore")
    blocks = pyarrow.json.ReadOptions(block_size=_BLOCK)
    with pyarrow.json.open_json(path, read_options=blocks, parse_options=options) as reader:
        for batch in _ahead(reader):
            if any(batch[name].null_count for name in _REQUIRED):
                raise _NoRecord
            schemas = set(batch["schema"].unique().to_pylist())
            if not schemas <= {None, *SCHEMAS}:
                raise _NoRecord
            yield batch


def _ahead(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The same batches, of which the next one is parsed while one is taken in."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def _batches(records: Iterable[EvalRecord]) -> Iterator[pyarrow.RecordBatch]:
    """Chunks of records in the shape that pyarrow's parser gives."""
    left = iter(records)
    while chunk := list(islice(left, _CHUNK)):
        columns = {name: [_clean(getattr(record, name)) for record in chunk] for name in _SCHEMA.names}
        yield pyarrow.RecordBatch.from_pydict(columns, schema=_SCHEMA)


def _clean(value: object) -> object:
    return encode(value).decode() if isinstance(value, str) else value


class _Columns:
    """Batches of records on their way to a table."""

    def __init__(self, lowest: int | None) -> None:
        self.rows = self.before = 0
        self._lowest = lowest
        self._names: dict[str, dict[str, int]] = {name: {} for name in _NAMED}
        self._parts: list[dict[str, NDArray[Any]]] = []

    def begin(self, source: str) -> None:
        """What is added from here on is of this file."""
        self._source, self.before, self._kept = source, self.rows, len(self._parts)

    def restart(self) -> None:
        """Forget what was added of this file."""
        self.rows = self.before
        del self._parts[self._kept :]

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Take the columns of some records over. Raises DataError for values that cannot be."""
        part: dict[str, NDArray[Any]] = {name: self._numbered(name, batch[name]) for name in _NAMED}
        for name in ("step", "sample", "tokens"):
            part[name] = batch[name].to_numpy(zero_copy_only=False)
        for name in ("correct", "truncated"):
            part[name] = batch[name].to_numpy(zero_copy_only=False).astype(bool)
        part["verdict"] = _verdicts(batch["verdict"])
        for name, source in (("logprob_sum", "logprob_sum"), ("stated", "stated_confidence")):
            value = np.array(batch[source].to_numpy(zero_copy_only=False), dtype=np.float64)
            part[name] = np.where(np.isfinite(value), value, np.nan)
        part["lowest"], short = _lowest_mean(batch["lowest_logprobs"], part["tokens"], self._lowest)
        answers = batch["extracted"].dictionary_encode()
        numbers = answers.indices.fill_null(len(answers.dictionary)).to_numpy(zero_copy_only=False)
        part["answer"] = np.append(_hashes(answers.dictionary), np.uint64(0))[numbers]
        part["completion"] = _hashes(batch["response"])
        self._check(part, short)
        self._parts.append(part)
        self.rows += len(batch)

    def table(self) -> Table:
        """All that was added. Raises DataError if a sample occurs twice."""
        whole = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        self._parts.clear()
        keys = [whole[name] for name in ("model", "step", "benchmark", "question")]
        order = np.lexsort([whole["sample"], *keys[::-1]])
        sorted_columns = {name: column[order] for name, column in whole.items()}
        changes = np.zeros(len(order), dtype=bool)
        for name in ("model", "step", "benchmark", "question"):
            changes[1:] |= sorted_columns[name][1:] != sorted_columns[name][:-1]
        twice = np.flatnonzero(~changes[1:] & (sorted_columns["sample"][1:] == sorted_columns["sample"][:-1]))
        names = {name: tuple(known) for name, known in self._names.items()}
        table = Table(names, unit=np.cumsum(changes), **sorted_columns)
        if len(twice):
            raise DataError(_twice(table, int(twice[0])))
        return table

    def _numbered(self, name: str, column: pyarrow.Array) -> Ints:
        """The index of each name, new ones numbered as they come."""
        encoded, known = column.dictionary_encode(), self._names[name]
        numbers = np.array([known.setdefault(text, len(known)) for text in encoded.dictionary.to_pylist()], dtype=int)
        return numbers[encoded.indices.to_numpy()]

    def _check(self, part: dict[str, NDArray[Any]], short: Bools) -> None:
        sums, tokens, stated = part["logprob_sum"], part["tokens"], part["stated"]
        right = part["verdict"] == _VERDICTS.index(Verdict.CORRECT.value)
        problems = [
            (part["verdict"] < 0, "verdict", f"not one of {', '.join(_VERDICTS)}"),
            (right != part["correct"], "correct", "does not agree with the verdict"),
            (tokens < 0, "tokens", "below 0"),
            (sums > _ROUNDING * np.maximum(tokens, 1), "logprob_sum", "log-probs are at most 0"),
            ((stated < 0) | (stated > 1), "stated_confidence", "outside [0, 1]"),
            (short, "lowest_logprobs", f"not the {self._lowest} lowest log-probs, ascending"),
        ]
        for wrong, name, reason in problems:
            if wrong.any():
                row = int(wrong.argmax())
                value = f"={part[name][row].item()}" if name in ("correct", "tokens", "logprob_sum") else ""
                number = self.rows - self.before + row + 1
                raise DataError(f"{self._source}: record {number}: {name}{value}: {reason}.")


def _twice(table: Table, row: int) -> str:
    name = {key: names[getattr(table, key)[row]] for key, names in table.names.items()}
    question = name["question"] if len(name["question"]) <= 60 else name["question"][:57] + "..."
    return (
        f"records: question {question!r} of {name['benchmark']!r} has sample {table.sample[row]} twice, both of "
        f"{name['model']!r} at step {table.step[row]}. Was a file given twice? Give each evaluation once."
    )


def _verdicts(column: pyarrow.Array) -> Ints:
    encoded = column.dictionary_encode()
    known = [_VERDICTS.index(text) if text in _VERDICTS else -1 for text in encoded.dictionary.to_pylist()]
    return np.array(known, dtype=int)[encoded.indices.to_numpy()]


def _hashes(column: pyarrow.Array) -> NDArray[np.uint64]:
    """64 bits of each text, equal for equal texts; 0 for null."""
    known = column.is_valid().to_numpy(zero_copy_only=False)
    texts = column.cast(pyarrow.binary()).fill_null(b"").to_pylist()
    return np.where(known, np.fromiter(map(xxh3_64_intdigest, texts), np.uint64, len(texts)) | np.uint64(1), 0)


def _lowest_mean(column: pyarrow.Array, tokens: Ints, count: int | None) -> tuple[Floats, Bools]:
    """([N] mean of the first `count` entries, NaN where there is no list; [N] the list is too short or not sorted)."""
    mean, bad = np.full(len(column), np.nan), np.zeros(len(column), dtype=bool)
    known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    if count is None or not len(known):
        return mean, bad
    values = column.flatten().to_numpy(zero_copy_only=False)
    sizes = column.value_lengths().drop_null().to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(len(known)), sizes)
    place = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    used = np.minimum(sizes, count)
    first = place < count
    bad[known] = sizes < np.minimum(count, tokens[known])
    falls = np.flatnonzero((row[1:] == row[:-1]) & ~(values[1:] >= values[:-1]))
    bad[known[row[falls]]] = True
    total = np.bincount(row[first], values[first], len(known))
    mean[known] = np.divide(total, used, out=np.full(len(known), np.nan), where=used > 0)
    return mean, bad
