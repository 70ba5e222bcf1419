"""What an evaluation that was interrupted has sampled and graded, so that the next one goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from capo_megatron.evaluation.records import parse_record, to_line
from capo_megatron.runlog import append_line, keep_rows, make_folder, read_rows
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
        """The parts that are there; one that was torn is not. Raises DataError for a file that cannot be read."""
        if not self._path.is_file():
            return []
        keep_rows(self._path, lambda _: True)  # the next part must not begin behind a torn one
        return [[parse_record(row, str(self._path)) for row in part["records"]] for part in read_rows(self._path)]

    def add(self, part: Sequence[EvalRecord]) -> None:
        """Append a part. Raises CapoError if it cannot be written."""
        make_folder(self._path.parent)
        append_line(self._path, json.dumps({"records": [json.loads(to_line(record)) for record in part]}))

    def remove(self) -> None:
        """Forget the parts, and those of other evaluations that would have become the same file."""
        for path in self._path.parent.glob(self._all):
            path.unlink(missing_ok=True)
