"""Runs as the methods that a figure compares: the seeds of one together, each named by what it differs in."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capo_megatron.errors import CapoError, DataError
from capo_megatron.evaluation import calibration
from capo_megatron.evaluation.gather import Run, open_runs
from capo_megatron.evaluation.metrics import Confidence, measure, values_per_question
from capo_megatron.evaluation.records import standard_error
from capo_megatron.evaluation.table import Table, read_table
from capo_megatron.types import Verdict

Floats = NDArray[np.float64]

BASE = "base"
_TITLES = {
    "capo": "CAPO",
    "cde": "CDE",
    "codapo": "CoDaPO",
    "dapo": "DAPO",
    "dcpo": "DCPO",
    "dr_grpo": "Dr.GRPO",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "scapo": "SCAPO",
    "simko": "SimKO",
}
_KIND = "algorithm.kind"
_SAME_METHOD = ("output", "seed", _KIND)  # what the runs of one method may differ in, and
_SAME_METHOD_SECTIONS = ("log.", "checkpoint.")


@dataclass
class Seed:
    """One run of a method, and the newest evaluation of each benchmark."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, tuple[int, Table]] = field(default_factory=dict)  # benchmark -> (step, records)

    @cached_property
    def measured(self) -> dict[str, Numbers]:
        """Benchmark -> its numbers."""
        return {name: Numbers.of(table) for name, (_, table) in self.tables.items()}

    @cached_property
    def selected(self) -> dict[str, dict[str, list[float]]]:
        """Benchmark -> accuracy by each way to select an answer among N = 1..k samples. This takes a while."""
        return {name: measure(table, ["benchmark"])[0].by_samples for name, (_, table) in self.tables.items()}


@dataclass(frozen=True)
class Numbers:
    """What figures show of one evaluation, as `metrics` defines it. NaN: undefined."""

    accuracy: float
    accuracy_se: float
    auc_mean: float
    auc_mean_se: float
    auc_questions: float
    aurc: float
    scored: int  # responses with a confidence
    coverage: Floats  # of them, ascending
    precision: Floats

    @staticmethod
    def of(table: Table) -> Numbers:
        rated = table.take(~table.has(Verdict.UNPARSEABLE))
        score = Confidence().of(rated)
        each = values_per_question(rated, score, 1)
        known = ~np.isnan(score)
        score, correct = score[known], rated.correct[known]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NaN says it
            _, coverage, precision = calibration.precision_coverage(score, correct)
            return Numbers(
                float(np.nanmean(each["accuracy"])),
                standard_error(each["accuracy"]),
                float(np.nanmean(each["auc_mean"])),
                standard_error(each["auc_mean"]),
                float((~np.isnan(each["auc_mean"])).sum()),
                calibration.aurc(score, correct),
                len(score),
                coverage,
                precision,
            )


@dataclass
class Method:
    """What is one line, or one point, of a figure."""

    kind: str  # algorithm, or the model of records without a run; "base"
    options: dict[str, Any] = field(default_factory=dict)  # of the config, flat, without the kind
    seeds: list[Seed] = field(default_factory=list)
    label: str = ""

    @property
    def title(self) -> str:
        return _TITLES.get(self.kind, self.kind)

    @property
    def evaluated(self) -> list[Seed]:
        return [seed for seed in self.seeds if seed.tables]


def gather_methods(paths: Sequence[Path]) -> tuple[list[Method], list[str]]:
    """(the methods, the base first; what was left out, a line each).

    Runs whose configs differ in nothing but seed and output (and what they log and save) are seeds of one method. A
    records file without a run belongs to the method, or is the method, that its records name as their model. Raises
    DataError if a path is no run, or a records file that was named cannot be read.
    """
    gathering = _Gathering()
    runs = open_runs(paths) if paths else []
    for run in sorted(runs, key=lambda run: not run.is_folder):  # stable: folders say which methods there are
        gathering.add(run)
    methods = sorted(gathering.methods.values(), key=lambda method: method.kind != BASE)
    name_methods(methods)
    return methods, gathering.notes


class _Gathering:
    def __init__(self) -> None:
        self.methods: dict[Hashable, Method] = {}
        self.notes: list[str] = []
        self._seen: set[bytes] = set()

    def add(self, run: Run) -> None:
        own = Seed(run.rows)
        method = self._method(*_identity(run)) if run.is_folder else None
        if method is not None:
            method.seeds.append(own)
        base = Seed()
        for path, table in self._tables(run):
            for key, part in table.split(["model", "step", "benchmark"]):
                model, step, benchmark = str(key["model"]), int(key["step"]), str(key["benchmark"])
                is_base = model == BASE or (run.is_folder and step == 0)
                if is_base or method is None:
                    seed = base if run.is_folder else self._loose(BASE if is_base else model, benchmark, step)
                else:
                    seed = own
                at = seed.tables.get(benchmark, (-1, None))[0]
                if at == step:
                    self.notes.append(f"{path}: {benchmark} at step {step} was evaluated twice; the first is drawn.")
                elif step > at:
                    seed.tables[benchmark] = (step, part)
        if base.tables:
            model_options = {name: value for name, value in _identity(run)[1].items() if name.startswith("model.")}
            self._method(BASE, model_options).seeds.append(base)

    def _tables(self, run: Run) -> Iterator[tuple[Path, Table]]:
        """The records files, but for copies of one that was read (the base that runs share)."""
        for path in run.record_files:
            try:
                digest = hashlib.sha256(path.read_bytes()).digest()
                if digest not in self._seen:
                    yield path, read_table([path])
                self._seen.add(digest)
            except (OSError, CapoError) as error:
                if not run.is_folder:
                    raise error if isinstance(error, CapoError) else DataError(f"{path}: {error.strerror}.") from error
                self.notes.append(f"{path} left out: {str(error).removeprefix(f'{path}: ')}")

    def _method(self, kind: str, options: dict[str, Any]) -> Method:
        key = (kind, tuple((name, repr(value)) for name, value in sorted(options.items())))
        return self.methods.setdefault(key, Method(kind, options))

    def _loose(self, model: str, benchmark: str, step: int) -> Seed:
        """Where records without a run go: the first of the method's seeds that lacks them."""
        same = [method for method in self.methods.values() if method.kind == model]
        method = same[0] if len(same) == 1 else self._method(model, {})
        for seed in method.seeds:
            if seed.tables.get(benchmark, (-1, None))[0] < step:
                return seed
        method.seeds.append(Seed())
        return method.seeds[-1]


def _identity(run: Run) -> tuple[str, dict[str, Any]]:
    """(kind, options) of a run's method."""
    options = {
        name: value
        for name, value in run.config.items()
        if name not in _SAME_METHOD and not name.startswith(_SAME_METHOD_SECTIONS) and value != {}
    }
    return str(run.config.get(_KIND, run.name)), options


# --- names ------------------------------------------------------------------------------------------------------------


def name_methods(methods: Sequence[Method]) -> None:
    """Give each its label: its kind, and the options in which methods of that kind differ."""
    for method in methods:
        same = [other for other in methods if other.kind == method.kind]
        method.label = " ".join([method.title, *describe(method.options, differing(same))])


def differing(methods: Sequence[Method]) -> list[str]:
    """The options that are not the same for all."""
    names = dict.fromkeys(name for method in methods for name in method.options)
    return [name for name in names if len({repr(method.options.get(name)) for method in methods}) > 1]


def describe(options: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Such as `tau=0.4`, with as much of each option's path as tells them apart."""
    return [f"{short_name(name, names)}={_value(options.get(name))}" for name in names]


def short_name(name: str, names: Sequence[str]) -> str:
    """The shortest end of a dotted path that no other of the names has."""
    parts = name.split(".")
    for start in range(len(parts) - 1, 0, -1):
        end = ".".join(parts[start:])
        if not any(other != name and f".{other}".endswith(f".{end}") for other in names):
            return end
    return name


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def value_order(method: Method, option: str) -> tuple[bool, float, str]:
    """Sorts methods by an option's value: numbers by size, then the rest by text."""
    value = method.options.get(option)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (not number, float(value) if number and value is not None else 0.0, _value(value))
