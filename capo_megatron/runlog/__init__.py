"""What a run writes for people, and where it came from."""

from capo_megatron.runlog.files import (
    append_line,
    check_writable,
    each_row,
    keep_rows,
    make_folder,
    read_rows,
    to_json,
    write_text,
    writing,
)
from capo_megatron.runlog.log import Phase, RunLog
from capo_megatron.runlog.provenance import PACKAGES, installed, provenance
from capo_megatron.runlog.trackers import require_packages

__all__ = [
    "PACKAGES",
    "Phase",
    "RunLog",
    "append_line",
    "check_writable",
    "each_row",
    "installed",
    "keep_rows",
    "make_folder",
    "provenance",
    "read_rows",
    "require_packages",
    "to_json",
    "write_text",
    "writing",
]
