"""Responses for a browser: columns to filter and sort by, and texts in compressed pieces that are opened on demand.

Everything is gzip in base64 inside of `<script type="text/plain">`: no text can end the element or become markup, and
the browser keeps what is not looked at as it is.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import IO, Any

from capo_megatron.types import EvalRecord, Verdict

MOST_SAMPLES = 100_000  # of an evaluation
VERDICTS = [verdict.value for verdict in Verdict] + ["unknown"]
_PIECE = 1 << 17  # characters of JSON in a piece: a browser opens one in a millisecond or two
_SHORT = 80  # characters of an answer or a question in the list
_HEAD = 600  # characters of a prompt in which what all prompts start with is looked for
_MOST_UINT = 2**32 - 1


def pack(data: bytes) -> str:
    """gzip in base64. The same bytes give the same text."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def element(name: str, data: bytes) -> str:
    """A script element that holds `data` and does nothing."""
    return f'<script type="text/plain" id="{name}">{pack(data)}</script>\n'


def to_ascii(value: Any) -> bytes:
    """JSON in ASCII: half characters survive as escapes. NaN is not allowed."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


class _Pieces:
    """Entries of texts, gathered into elements `<name>0`, `<name>1`, ... of a file."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name, self._file = name, file
        self._entries: list[Sequence[str | None]] = []
        self._size = self._count = 0
        self.starts: list[int] = []  # the first entry of each piece

    def add(self, entry: Sequence[str | None]) -> None:
        self._entries.append(entry)
        self._size += sum(len(text or "") for text in entry)
        self._count += 1
        if self._size >= _PIECE:
            self.flush()

    def flush(self) -> None:
        if not self._entries:
            return
        self._file.write(element(f"{self._name}{len(self.starts)}", to_ascii(self._entries)).encode("ascii"))
        self.starts.append(self._count - len(self._entries))
        self._entries, self._size = [], 0


class _Numbers(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class Samples:
    """Takes responses, and spools their texts to `file`: an empty one, which needs as much room as the page."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._responses, self._prompts = _Pieces("response", file), _Pieces("prompt", file)
        self._sources: list[dict[str, Any]] = []
        self._benchmarks, self._answers = _Numbers(), _Numbers()
        self._questions: dict[tuple[str, str, bytes], int] = {}
        self._listed: list[tuple[int, str, str, int]] = []  # benchmark, id, head of the prompt, reference answer
        self._columns: dict[str, array[Any]] = {
            "source": array("H"),
            "question": array("I"),
            "sample": array("I"),
            "step": array("I"),
            "verdict": array("B"),
            "truncated": array("B"),
            "tokens": array("I"),
            "answer": array("I"),
            "logprob": array("f"),
        }

    def __len__(self) -> int:
        return len(self._columns["source"])

    def add(self, label: str, records: Sequence[EvalRecord], most: int = MOST_SAMPLES) -> None:
        """Take the records of one evaluation: all, or about `most` of them in whole questions, evenly spread."""
        numbers = _Numbers()
        number = [numbers[record.benchmark, record.question] for record in records]
        wanted = min(len(numbers), max(1, len(numbers) * most // max(len(records), 1)))
        chosen = {index * len(numbers) // wanted for index in range(wanted)}
        kept = [record for record, question in zip(records, number, strict=True) if question in chosen]
        self._begin(label, len(kept), len(records))
        for record in kept:
            logprob = record.logprob_sum / record.tokens if record.tokens > 0 else math.nan
            self._add(
                self._question(record.benchmark, record.question, record.prompt, record.answer),
                record.sample,
                record.step,
                record.verdict,
                record.truncated,
                record.tokens,
                logprob,
                record.extracted,
                record.response,
            )

    def add_training(self, label: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take rows of a run's samples/, each with its step."""
        before = len(self)
        self._begin(label, 0, 0, training=True)
        for row in rows:
            prompt, answer = str(row.get("prompt", "")), str(row.get("answer", ""))
            extracted = row.get("extracted")
            self._add(
                self._question("training", str(row.get("problem", "")), prompt, answer),
                row.get("sample"),
                row.get("step"),
                str(row.get("verdict")),
                bool(row.get("truncated")),
                row.get("tokens"),
                row.get("mean_logprob"),
                None if extracted is None else str(extracted),
                str(row.get("response", "")),
            )
        if len(self) == before:
            self._sources.pop()
        else:
            self._sources[-1] |= {"kept": len(self) - before, "total": len(self) - before}

    def rename(self, labels: Mapping[str, str]) -> None:
        """Give evaluations other labels, once it is known which others there are."""
        for source in self._sources:
            source["name"] = labels.get(source["name"], source["name"])

    def elements(self) -> Iterator[bytes]:
        """What the page needs, the columns before the texts, in parts of bounded size."""
        self._responses.flush()
        self._prompts.flush()
        index = {
            "rows": len(self),
            "sources": self._sources,
            "verdicts": VERDICTS,
            "benchmarks": list(self._benchmarks),
            "questions": self._shown_questions(),
            "answers": list(self._answers),
            "responses": self._responses.starts,
            "prompts": self._prompts.starts,
        }
        yield element("index", to_ascii(index)).encode("ascii")
        for name, column in self._columns.items():
            yield element(f"column-{name}", _little_endian(column)).encode("ascii")
        self._file.seek(0)
        while part := self._file.read(1 << 20):
            yield part

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, label: str, kept: int, total: int, training: bool = False) -> None:
        self._sources.append({"name": label, "kept": kept, "total": total, "training": training})

    def _question(self, benchmark: str, name: str, prompt: str, answer: str) -> int:
        content = json.dumps([prompt, answer]).encode("ascii")
        key = (benchmark, name, blake2b(content, digest_size=8).digest())
        if key not in self._questions:
            self._questions[key] = len(self._questions)
            self._prompts.add((prompt, answer))
            self._listed.append((self._benchmarks[benchmark], name, prompt[:_HEAD], self._answers[_short(answer)]))
        return self._questions[key]

    def _add(
        self,
        question: int,
        sample: Any,
        step: Any,
        verdict: str,
        truncated: bool,
        tokens: Any,
        logprob: Any,
        extracted: str | None,
        response: str,
    ) -> None:
        columns = self._columns
        columns["source"].append(len(self._sources) - 1)
        columns["question"].append(question)
        columns["sample"].append(_whole(sample))
        columns["step"].append(_whole(step))
        columns["verdict"].append(VERDICTS.index(verdict) if verdict in VERDICTS else len(VERDICTS) - 1)
        columns["truncated"].append(truncated)
        columns["tokens"].append(_whole(tokens))
        columns["answer"].append(self._answers[None if extracted is None else _short(extracted)])
        columns["logprob"].append(logprob if isinstance(logprob, float | int) else math.nan)
        self._responses.add((response, extracted))

    def _shown_questions(self) -> list[tuple[int, str, str, int]]:
        """Benchmark, id, a short text and reference answer of each question."""
        heads: dict[int, list[str]] = {}
        for benchmark, _, head, _ in self._listed:
            heads.setdefault(benchmark, []).append(head)
        shared = {benchmark: _shared_start(found) for benchmark, found in heads.items()}
        return [(bench, name, _short(head[shared[bench] :]), answer) for bench, name, head, answer in self._listed]


def _shared_start(heads: list[str]) -> int:
    """How many characters all prompts start with, such as a template's, cut back to the end of a line or a word."""
    if len(set(heads)) < 2:
        return 0
    first, last = min(heads), max(heads)
    differs = (index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    start = first[: next(differs, len(first))]
    return max(start.rfind(mark) for mark in "\n >") + 1


def _short(text: str) -> str:
    words = " ".join(text[: 4 * _SHORT].split())
    return words if len(words) <= _SHORT else words[: _SHORT - 1] + "…"


def _whole(value: Any) -> int:
    return min(max(value, 0), _MOST_UINT) if isinstance(value, int) else 0


def _little_endian(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
