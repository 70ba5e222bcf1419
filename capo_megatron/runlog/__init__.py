"""What a run writes for people, and where it came from.

`log.RunLog` and `trackers` are imported by name: they need the config, and that torch, which records do not.
"""

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
from capo_megatron.runlog.provenance import PACKAGES, installed, provenance

__all__ = [
    "PACKAGES",
    "append_line",
    "check_writable",
    "each_row",
    "installed",
    "keep_rows",
    "make_folder",
    "provenance",
    "read_rows",
    "to_json",
    "write_text",
    "writing",
]
