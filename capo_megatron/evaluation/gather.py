"""What a run's folder or a records file holds, read as far as it goes; what is missing is said, not raised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capo_megatron.config.dialect import parse
from capo_megatron.errors import CapoError, DataError
from capo_megatron.runlog import read_rows

_PARTS = ("resolved.yaml", "metrics.jsonl", "eval", "samples")
_MOST_STEPS = 60  # of samples/ that are shown, evenly spread, the last one among them


@dataclass
class Run:
    """A run's folder, or a records file that stands alone (no metrics, no config)."""

    name: str
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl, those that name their step
    config: dict[str, Any] = field(default_factory=dict)  # resolved.yaml, flat: "algorithm.tau" -> 0.4
    made_with: dict[str, Any] = field(default_factory=dict)  # versions.json, flat
    record_files: list[Path] = field(default_factory=list)
    sample_files: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what the folder lacks, a sentence each

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @property
    def last_step(self) -> int | None:
        return self.rows[-1]["step"] if self.rows else None

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("train.steps")
        return steps if isinstance(steps, int) else None


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at these paths. Raises DataError if there are none, one is named twice, or one is no run."""
    if not paths:
        raise DataError("no run named. Name a run's folder or a records file.")
    resolved = [Path(path).resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise DataError(f"{paths[index]} is named twice. Name each run once.")
    return [_open(name, Path(path)) for name, path in zip(_names(resolved), paths, strict=True)]


def _open(name: str, path: Path) -> Run:
    if path.is_file():
        return Run(name, path, record_files=[path])
    if not any((path / part).exists() for part in _PARTS):
        what = "no run in there" if path.is_dir() else "no such folder or file"
        raise DataError(f"{path}: {what}. Name a run's folder ({', '.join(_PARTS)}) or a records file (jsonl).")
    run = Run(name, path)
    _read_config(run)
    _read_metrics(run)
    run.record_files = sorted((path / "eval").glob("*.jsonl"))
    if not run.record_files:
        run.missing.append("No evaluation records (eval/): run `capo-megatron eval` with and without --base.")
    run.sample_files = _spread(sorted((path / "samples").glob("step_*.jsonl")))
    if not run.sample_files:
        run.missing.append("No training samples (samples/).")
    return run


def _read_config(run: Run) -> None:
    try:
        run.config = flat(parse((run.path / "resolved.yaml").read_text(encoding="utf-8"), "resolved.yaml"))
        run.made_with = flat(json.loads((run.path / "versions.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, CapoError) as error:
        what = "resolved.yaml" if not run.config else "versions.json"
        run.missing.append(f"{what} cannot be read ({_reason(error)}): settings are incomplete.")


def _read_metrics(run: Run) -> None:
    path = run.path / "metrics.jsonl"
    try:
        run.rows = [row for row in read_rows(path) if isinstance(row.get("step"), int)]
    except DataError as error:
        run.missing.append(f"No training curves: {_reason(error)}")
        return
    last, planned = run.last_step, run.planned_steps
    if last is None:
        run.missing.append("No training curves: metrics.jsonl has no step yet.")
    elif planned is not None and last < planned:
        run.missing.append(f"The run has stopped, or is still going, at step {last} of {planned}.")


def _reason(error: Exception) -> str:
    """The error without the path to the file, which the reader of a page does not have."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    first, _, rest = str(error).partition(": ")
    return f"{Path(first).name}: {rest}" if rest and "/" in first else str(error)


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; lists and empty mappings stay values."""
    if not isinstance(tree, Mapping) or not tree:
        return {above: tree} if above else {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{above}.{key}" if above else str(key))
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart, without the suffix of files."""
    bare = [path.with_suffix("") if path.is_file() else path for path in paths]
    for depth in range(1, max(len(path.parts) for path in bare)):
        names = ["/".join(path.parts[-depth:]) for path in bare]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _spread(files: list[Path]) -> list[Path]:
    if len(files) <= _MOST_STEPS:
        return files
    return [files[round(index * (len(files) - 1) / (_MOST_STEPS - 1))] for index in range(_MOST_STEPS)]


def training_samples(run: Run) -> Iterator[dict[str, Any]]:
    """The rows of a run's samples/, each with its step. What cannot be read is left out and said in `missing`."""
    for path in run.sample_files:
        try:
            rows = read_rows(path)
            step = int(path.stem.removeprefix("step_"))
        except (DataError, ValueError) as error:
            run.missing.append(f"Training samples left out: {_reason(error)}")
            continue
        for row in rows:
            yield {**row, "step": step}
