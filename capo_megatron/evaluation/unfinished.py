"""What an evaluation that was interrupted has sampled and graded, so that the next one goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from capo_megatron.errors import DataError
from capo_megatron.evaluation.records import parse_record, to_line
from capo_megatron.runlog import append_line, make_folder, write_text
from capo_megatron.types import EvalRecord


class Unfinished:
    """Records by parts of some whole problems each, in a hidden file beside the records' file that they will become.

    Its name depends on `identity`, the text of all that decides what is sampled: another evaluation finds nothing.
    """

    def __init__(self, records: Path, identity: str) -> None:
        digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self._all = f".{records.name}.*.part"
        self._path = records.with_name(f".{records.name}.{digest}.part")

    def parts(self) -> list[list[EvalRecord]]:
        """The first parts, up to one that is torn, damaged or out of turn; what comes after them is forgotten."""
        found: list[list[EvalRecord]] = []
        if not self._path.is_file():
            return found
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                part = json.loads(line)
                if part["part"] != len(found) or not line.endswith(b"\n"):
                    break
                found.append([parse_record(row, str(self._path)) for row in part["records"]])
            except (ValueError, KeyError, TypeError, AttributeError, DataError):
                break
        write_text(self._path, "".join(self._line(number, part) for number, part in enumerate(found)))
        return found

    def add(self, number: int, part: Sequence[EvalRecord]) -> None:
        """Append the part of this number, from 0. Raises CapoError if it cannot be written."""
        make_folder(self._path.parent)
        append_line(self._path, self._line(number, part).rstrip("\n"))

    @staticmethod
    def _line(number: int, part: Sequence[EvalRecord]) -> str:
        return json.dumps({"part": number, "records": [json.loads(to_line(record)) for record in part]}) + "\n"

    def remove(self) -> None:
        """Forget the parts, and those of other evaluations that would have become the same file."""
        for path in self._path.parent.glob(self._all):
            path.unlink(missing_ok=True)
