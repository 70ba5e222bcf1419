"""Warnings about what was asked for: options that are allowed and seldom meant."""

from __future__ import annotations

import logging
import os
from functools import cache

_log = logging.getLogger(__name__)


@cache
def warn_once(text: str) -> None:
    """Warn, however often and on however many ranks it is found."""
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s", text)
