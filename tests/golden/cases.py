"""The golden cases by id, one file per algorithm or metric, and what it takes to agree with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILES = sorted(Path(__file__).parent.glob("*.json"))
CASES = {case["id"]: case for file in FILES for case in json.loads(file.read_text())["cases"]}

# Values are rounded to six digits. The file's own tolerances fit float64; float32 arithmetic adds its own error.
FLOAT32_RTOL = 1e-4


def assert_golden(got: Any, expected: Any, case: dict[str, Any]) -> None:
    """`got` equals `expected` (null = NaN) within the case's tolerance, or float32's if `got` is such a tensor."""
    single = isinstance(got, torch.Tensor) and got.dtype == torch.float32
    values = got.detach().double().numpy() if isinstance(got, torch.Tensor) else np.asarray(got, dtype=float)
    rtol = FLOAT32_RTOL if single else case["rtol"]
    np.testing.assert_allclose(values, np.asarray(expected, dtype=float), rtol=rtol, atol=case["atol"])
