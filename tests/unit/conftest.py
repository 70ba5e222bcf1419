"""What every unit test starts with."""

from __future__ import annotations

import pytest

from capo_megatron.notices import warn_once


@pytest.fixture(autouse=True)
def _nothing_was_warned_of() -> None:
    warn_once.cache_clear()
