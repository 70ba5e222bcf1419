"""Problem files: jsonl, json and parquet, read into checked rows.

Every row has a problem and an answer, both as text. Whatever is wrong with a file is reported with its place, as
`file:line` (jsonl) or `file: row N` (json, parquet), lines and rows counted from 1.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any

from capo_megatron.answers import boxed_answer
from capo_megatron.config import DataConfig
from capo_megatron.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")

TOLERATED = 0.01  # share of a file's rows that may lack an answer

# Under which public benchmarks have their problems and answers. A solution is asked only for the box in it.
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "solution")

_Placed = tuple[str, Mapping[str, Any]]  # where a record stands, and the record


@dataclass(frozen=True, slots=True)
class Row:
    """One problem as its file tells it, before any template."""

    problem: str
    answer: str
    id: str  # "" where no id column was asked for
    source: str  # the file's name without its suffix; with folders before it where files of one call share that name
    place: str
    perturbed: tuple[str, ...] = ()  # other wordings of the problem, where a column for them was asked for


def read_files(paths: tuple[str, ...], config: DataConfig, published: bool = False) -> tuple[list[Row], Counter[str]]:
    """All rows of `paths` in order, and how many were left out for having no answer.

    `published` also takes files as public benchmarks come: where one lacks the config's columns, it may have those of
    PROBLEM_COLUMNS and ANSWER_COLUMNS.

    Public sets have a few rows whose answer is null or empty. Up to `TOLERATED` of a file's rows may be so and are left
    out and counted; with more of them it is probably the wrong column, and the first one is reported. Raises DataError.
    """
    rows, left_out = [], Counter[str]()
    if not all(paths):
        raise DataError("'': not a problem file, the name is empty. Give a path, e.g. problems.jsonl.")
    files = list(map(Path, paths))
    for path, source in zip(files, _sources(files), strict=True):
        columns = _published_columns(path, config) if published else config
        read = {place: _row(record, columns, place, source) for place, record in _records(path, columns)}
        if not read:
            raise DataError(f"{path}: no problems in this file. Remove it from the data section, or fill it.")
        blank = [place for place, row in read.items() if row is None]
        if len(blank) > TOLERATED * len(read):
            raise DataError(
                f"{blank[0]}: {columns.answer_column} is empty ({len(blank)} of {len(read)} rows; up to "
                f"{TOLERATED:.0%} would be left out). Fill it, or set data.answer_column."
            )
        rows += [row for row in read.values() if row is not None]
        left_out["no_answer"] += len(blank)
    return rows, left_out


def answer_text(value: object, place: str) -> str:
    """The reference answer as plain text.

    Text keeps its form ("025" stays "025"). Numbers are written out without exponent, and integral ones without a
    fraction: 27.0 is "27". A list of one answer is that answer; several are joined by ", ", as in "69, 84". Of a
    solution that ends in a line "#### 18", as GSM8K's do, 18 is the answer. "" is no answer. Raises DataError on
    anything else.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        last = value.rstrip().rpartition("\n")[2]
        return last.removeprefix("####").strip() if last.startswith("####") else value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        exact = Decimal(repr(value)) if isinstance(value, float) else value
        return str(int(exact)) if exact == exact.to_integral_value() else format(exact.normalize(), "f")
    if isinstance(value, list):
        parts = [answer_text(item, place) for item in value]
        return ", ".join(parts) if all(parts) else ""
    raise DataError(f"{place}: an answer must be text, a finite number or a list of these, got {_short(value)}.")


def digest(*parts: object) -> str:
    """16 hex digits that depend on `parts` alone: the same in every process, on every machine."""
    return blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).hexdigest()


def did_you_mean(name: str, known: list[str]) -> str:
    """' Did you mean "x"?' for the nearest of `known`, or nothing."""
    near = get_close_matches(name, known, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def _sources(files: list[Path]) -> list[str]:
    """A name for each file: its stem, or as much of its path as tells it from other files of that stem."""
    places = [path.resolve() for path in files]
    names = []
    for path, place in zip(files, places, strict=True):
        others = {other for other, file in zip(places, files, strict=True) if file.stem == path.stem} - {place}
        endings = ["/".join((*place.parent.parts[-n:], path.stem)) for n in range(1, len(place.parts))]
        apart = [ending for ending in endings if not any(_ends(other, ending) for other in others)]
        names.append(path.stem if not others else apart[0] if apart else path.name)
    return names


def _ends(place: Path, ending: str) -> bool:
    return f"/{place.with_suffix('').as_posix().lstrip('/')}".endswith(f"/{ending.lstrip('/')}")


# --- one row --------------------------------------------------------------------------------------------------------


def _row(record: Mapping[str, Any], config: DataConfig, place: str, source: str) -> Row | None:
    problem = _column(record, config.prompt_column, "prompt_column", place)
    answer = _column(record, config.answer_column, "answer_column", place)
    if not isinstance(problem, str):
        raise DataError(f"{place}: {config.prompt_column} must be text, got {_short(problem)}.")
    if not problem.strip():
        raise DataError(f"{place}: {config.prompt_column} is empty. Give a problem, or remove the row.")
    text = answer_text(answer, place)
    if config.answer_column == "solution":
        text = boxed_answer(text) or ""
    _check_characters(problem, config.prompt_column, place)
    _check_characters(text, config.answer_column, place)
    name = "" if config.id_column is None else _id(_column(record, config.id_column, "id_column", place), place)
    other = config.perturbed_column
    perturbed = () if other is None else _wordings(_column(record, other, "perturbed_column", place), other, place)
    return Row(problem, text, name, source, place, perturbed) if text else None


def _published_columns(path: Path, config: DataConfig) -> DataConfig:
    """`config` with the columns under which this file has problems and answers."""
    found = _names(path, config)

    def choose(configured: str, others: tuple[str, ...]) -> str:
        known = configured.split(".")[0] in found or configured in found
        return configured if known else next((name for name in others if name in found), configured)

    return replace(
        config,
        prompt_column=choose(config.prompt_column, PROBLEM_COLUMNS),
        answer_column=choose(config.answer_column, ANSWER_COLUMNS),
    )


def _names(path: Path, config: DataConfig) -> set[str]:
    """The columns of a file's first record."""
    if path.suffix != ".parquet":
        return set(next((record for _, record in _records(path, config)), {}))
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return set(pyarrow.parquet.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged or not a parquet file ({str(error).splitlines()[0]}).") from error


def _wordings(value: object, column: str, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text.strip() for text in value):
        raise DataError(f"{place}: {column} must be a list of texts, got {_short(value)}. Unset data.perturbed_column?")
    for text in value:
        _check_characters(text, column, place)
    return tuple(value)


def _id(value: object, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{place}: an id must be text or an integer, got {_short(value)}. Unset data.id_column?")
    _check_characters(str(value), "an id", place)
    return str(value)


def _check_characters(text: str, column: str, place: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character: neither tokenizers nor files can write it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(
            f"{place}: {column} holds {half}, half a character. Write the whole pair, or remove it."
        ) from error


def _column(record: Mapping[str, Any], column: str, option: str, place: str) -> Any:
    """The value of `column`; `a.b` looks into column a, and `a.0` takes the first item of a list."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise _missing(column, sorted(record), option, place)
    return value


def _missing(column: str, available: list[str], option: str, place: str) -> DataError:
    hint = did_you_mean(column, available)
    columns = ", ".join(available) or "none"
    return DataError(f'{place}: no column "{column}".{hint} Columns here: {columns}. Set data.{option}.')


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


# --- the three formats ------------------------------------------------------------------------------------------------


def _records(path: Path, config: DataConfig) -> Iterator[_Placed]:
    if not path.exists():
        raise DataError(f"{path}: no such file (relative paths start at {Path.cwd()}).")
    if not path.is_file() or path.suffix not in SUFFIXES:
        folder = ", it is a folder" if path.is_dir() else ""
        raise DataError(f"{path}: not a problem file{folder}. Known kinds: {', '.join(SUFFIXES)}.")
    return _parquet_records(path, config) if path.suffix == ".parquet" else _json_records(path)


def _json_records(path: Path) -> Iterator[_Placed]:
    """Records of a JSON array or of JSON lines, told apart by the first character: both names are used for both."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1  # not of `content`: a byte order mark is cut off
        raise DataError(
            f"{path}:{number}: cannot be read as UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason}). "
            "Save the file as UTF-8."
        ) from error
    if text.lstrip().startswith("["):
        items = _parse(text, str(path))
        yield from ((place, _object(item, place)) for place, item in _numbered(path, items))
        return
    # Not splitlines: U+2028 and its like are legal inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _object(_parse(line, place), place)


def _numbered(path: Path, items: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{path}: row {number}", item) for number, item in enumerate(items, start=1))


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg} at line {error.lineno}, column {error.colno}).") from error
    except RecursionError as error:
        raise DataError(f"{place}: lists or objects are nested too deeply to be read. Flatten or remove it.") from error
    except ValueError as error:  # more digits than Python reads
        raise DataError(
            f"{place}: an integer is too long ({str(error).partition(';')[0]}). Write it as text."
        ) from error


def _object(item: object, place: str) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise DataError(
            f'{place}: expected a JSON object such as {{"problem": ..., "answer": ...}}, got {_short(item)}.'
        )
    return item


def _parquet_records(path: Path, config: DataConfig) -> Iterator[_Placed]:
    import pyarrow as pa  # only here: half a second that JSON files need not pay
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=_parquet_columns(path, file.schema_arrow.names, config)):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged or not a parquet file ({str(error).splitlines()[0]}).") from error


def _parquet_columns(path: Path, names: list[str], config: DataConfig) -> list[str]:
    """The top-level columns to read, so that a wide file costs no more than what is used of it."""
    wanted = {"prompt_column": config.prompt_column, "answer_column": config.answer_column}
    if config.id_column is not None:
        wanted["id_column"] = config.id_column
    if config.perturbed_column is not None:
        wanted["perturbed_column"] = config.perturbed_column
    columns = []
    for option, column in wanted.items():
        top = column if column in names else column.split(".")[0]
        if top not in names:
            raise _missing(column, sorted(names), option, str(path))
        columns.append(top)
    return columns
