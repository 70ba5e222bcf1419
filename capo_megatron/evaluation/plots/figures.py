"""What each figure of CAPO's paper (arXiv 2604.12632) shows, and Table 1."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from capo_megatron.algorithms.equations import capo_advantage, grpo_advantage
from capo_megatron.errors import ConfigError, DataError
from capo_megatron.evaluation.calibration import precision_coverage
from capo_megatron.evaluation.comparison import markdown
from capo_megatron.evaluation.plots.drawing import (
    Line,
    Panel,
    Point,
    Style,
    assign_styles,
    draw,
    ordered_styles,
)
from capo_megatron.evaluation.plots.methods import (
    BASE,
    Method,
    describe,
    differing,
    gather_methods,
    short_name,
    value_order,
)
from capo_megatron.evaluation.records import Columns
from capo_megatron.evaluation.selection import FEWEST_TO_PRUNE
from capo_megatron.evaluation.votes import METHODS as SELECTIONS
from capo_megatron.runlog import make_folder, write_text
from capo_megatron.types import EvalRecord

Floats = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]

_STEP = "training step"
_COVERAGE = "share of responses kept, most confident first"
_FEWEST = 50  # responses, and
_LEAST = 0.01  # share of them, below which the precision of the most confident ones is mere noise
_TAUS = (0.4, 0.6, 1.0)  # for which the paper reports results
_GAPS = np.linspace(-1.5, 1.5, 121)  # nats per token


class _Absent(Exception):
    """Why there is no such figure, in words that follow its name."""


@dataclass(frozen=True)
class Figure:
    """How a figure, or a table, is made of methods in a folder."""

    make: Callable[[Sequence[Method], Path], list[Path]]  # raises _Absent
    needs_runs: bool = True


def plot_runs(paths: Sequence[Path], folder: Path, names: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Draw the figures of FIGURES that are named, or all; (the files written, what was left out, a line each).

    `paths`: run folders, and records files for what needs records alone; none are needed for "gap". Raises ConfigError
    for an unknown name, DataError if the runs give no figure at all or cannot be read, CapoError if the files cannot
    be written.
    """
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ConfigError(f"figure {unknown[0]!r}: unknown. Choose among {', '.join(FIGURES)}.")
    if not paths and all(FIGURES[name].needs_runs for name in names):
        raise DataError("no run named. Name runs' folders or records files; only --figures gap needs none.")
    wanted = [name for name in FIGURES if not names or name in names]
    methods, notes = gather_methods(paths)
    found: dict[str, list[Path]] = {}
    for name in sorted(wanted, key=lambda name: not FIGURES[name].needs_runs):
        try:
            if FIGURES[name].needs_runs or found or names:  # the equations alone are no figure of these runs
                found[name] = FIGURES[name].make(methods, folder)
        except _Absent as reason:
            notes.append(f"{name} left out: {reason}")
    if not found:
        raise DataError(f"nothing to draw. {' '.join(notes)}")
    return [path for name in wanted for path in found.get(name, [])], notes


# --- over steps -------------------------------------------------------------------------------------------------------


def training_figure(runs: Mapping[str, Rows], records: Mapping[str, Sequence[EvalRecord]], path: Path) -> list[Path]:
    """The files `path`.png and `path`.svg: accuracy and AUC-mean over training, and precision over coverage.

    `runs`: name -> rows of metrics.jsonl, of which those with `validation/...` are drawn, with bands of one standard
    error. `records`: name -> evaluation records; the name "base" is drawn in grey. A name looks alike in all panels.
    Raises DataError if there is nothing to draw, CapoError if the files cannot be written.
    """
    path = Path(path)
    panels = [
        ("Validation accuracy", _STEP, [_over_steps(name, [rows], "accuracy", "\n") for name, rows in runs.items()]),
        ("Validation AUC-mean", _STEP, [_over_steps(name, [rows], "auc_mean", "\n") for name, rows in runs.items()]),
        ("Precision over coverage", _COVERAGE, [_coverage(*item) for item in records.items()]),
    ]
    drawn = [
        Panel(title, label, found) for title, label, lines in panels if (found := [line for line in lines if line])
    ]
    if not drawn:
        raise DataError(f"{path}: nothing to draw: no run has validation metrics, and there are no evaluation records.")
    return draw(drawn, assign_styles([*runs, *records]), path)


def _over_steps(name: str, seeds: Sequence[Rows], metric: str, apart: str = ", ", title: str = "") -> Line | None:
    """Validation's metric: mean over seeds with their standard deviation, of one seed with its standard error."""
    line = _series(name, seeds, f"validation/{metric}")
    if line is None:
        return None
    label = f"{title or name} {line.y[-1]:.3f}"
    mixed = _series(name, seeds, "validation/auc_questions")
    if metric == "auc_mean" and mixed is not None:
        label += f"{apart}{mixed.y[-1]:.0f} mixed"
    return Line(name, line.x, line.y, line.band, label)


def _series(name: str, seeds: Sequence[Rows], key: str) -> Line | None:
    """Over the steps that all seeds have which have any."""
    found = [known for rows in seeds if (known := {row["step"]: row for row in rows if row.get(key) is not None})]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    if not steps:
        return None
    values = np.array([[known[step][key] for step in steps] for known in found], dtype=float)
    if len(found) > 1:
        band = values.std(axis=0, ddof=1)
    else:
        band = np.array([found[0][step].get(f"{key}_se") for step in steps], dtype=float)  # None becomes NaN
    return Line(name, np.array(steps, dtype=float), values.mean(axis=0), band)


def _coverage(name: str, records: Sequence[EvalRecord]) -> Line | None:
    columns = Columns.of(records)
    scored = ~np.isnan(columns.score)
    _, coverage, precision = precision_coverage(columns.score[scored], columns.correct[scored])
    coverage, precision = _enough(coverage, precision, int(scored.sum()))
    if not len(coverage):
        return None
    few = np.unique(np.searchsorted(coverage, np.linspace(coverage[0], 1, 300)).clip(max=len(coverage) - 1))
    return Line(name, coverage[few], precision[few], None, f"{name} {precision[-1]:.3f}", marked=False)


def _enough(coverage: Floats, precision: Floats, total: int) -> tuple[Floats, Floats]:
    """The part of the curve that is more than noise."""
    enough = coverage * total >= min(max(_FEWEST, _LEAST * total), total) - 1e-6
    return coverage[enough], precision[enough]


def _validation(metrics: Mapping[str, str], name: str) -> Callable[[Sequence[Method], Path], list[Path]]:
    """A figure with a panel for each metric of validation -> title."""

    def make(methods: Sequence[Method], folder: Path) -> list[Path]:
        panels = []
        for metric, title in metrics.items():
            lines = [_over_steps(one.label, _rows(one), metric, title=one.label) for one in methods]
            if drawn := [line for line in lines if line]:
                panels.append(Panel(f"Validation {title}", _STEP, drawn))
        if not panels:
            raise _Absent(
                f"no run's metrics.jsonl has validation/{next(iter(metrics))}. Train with eval.every above 0."
            )
        return draw(panels, _styles(methods), folder / name, _spreads(methods))

    return make


def _trajectory(methods: Sequence[Method], folder: Path) -> list[Path]:
    """Where validation leads in the plane of both, from the first step to the last."""
    points = []
    for method in methods:
        rows = [
            [
                row
                for row in seed
                if row.get("validation/accuracy") is not None and row.get("validation/auc_mean") is not None
            ]
            for seed in _rows(method)
        ]
        x, y = (_series(method.label, rows, f"validation/{metric}") for metric in ("accuracy", "auc_mean"))
        if x is not None and y is not None and len(x.x) > 1:
            errors = [line.band[-1] if line.band is not None else math.nan for line in (x, y)]
            points.append(Point(method.label, x.y[-1], y.y[-1], errors[0], errors[1], method.label, (x.y, y.y)))
    if not points:
        raise _Absent(
            "no run's metrics.jsonl has accuracy and AUC-mean of two validations. Train with eval.every above 0."
        )
    start = [float(np.mean([point.trail[axis][0] for point in points if point.trail])) for axis in (0, 1)]
    panel = Panel(
        "From the first to the last validation",
        "accuracy",
        points=points,
        y_label="AUC-mean",
        crosshair=(start[0], start[1]),
    )
    note = f"Dotted: the start. Large: the end. {_spreads(methods)}"
    return draw([panel], _styles(methods), folder / "trajectory", note)


# --- from records -----------------------------------------------------------------------------------------------------


def _accuracy_auc(methods: Sequence[Method], folder: Path) -> list[Path]:
    """Each method as a point, on the mean of the benchmarks and on each."""
    benchmarks = _benchmarks(methods)
    panels = [_plane(methods, [name], name) for name in benchmarks]
    common = [name for name in benchmarks if all(_spread(one, [name], "auc_mean") for one in methods if one.evaluated)]
    if len(common) > 1:
        panels.insert(0, _plane(methods, common, f"Mean of {len(common)} benchmarks"))
    panels = [panel for panel in panels if panel.points]
    if not panels:
        raise _Absent("no benchmark has an AUC-mean: no question has right and wrong answers with log-probs.")
    dotted = "Dotted: the base. " if any(method.kind == BASE for method in methods) else ""
    note = f"In brackets: mixed questions, which AUC-mean is over. {dotted}{_spreads(methods)}"
    return draw(panels, _styles(methods), folder / "accuracy-auc", note)


def _plane(methods: Sequence[Method], benchmarks: Sequence[str], title: str) -> Panel:
    points, base = [], None
    for method in methods:
        accuracy, auc = (_spread(method, benchmarks, name) for name in ("accuracy", "auc_mean"))
        mixed = _spread(method, benchmarks, "auc_questions")
        if accuracy and auc and mixed:
            label = f"{method.label} ({mixed[0] * len(benchmarks):.0f})"
            points.append(Point(method.label, accuracy[0], auc[0], accuracy[1], auc[1], label))
            base = (accuracy[0], auc[0]) if method.kind == BASE else base
    return Panel(title, "accuracy", points=points, y_label="AUC-mean", crosshair=base)


def _spread(method: Method, benchmarks: Sequence[str], name: str) -> tuple[float, float] | None:
    """(mean over seeds of the mean over benchmarks, sd of seeds or the standard error of one); None: undefined."""
    found = []
    for seed in method.evaluated:
        if all(benchmark in seed.tables for benchmark in benchmarks):
            of_seed = [seed.measured[benchmark] for benchmark in benchmarks]
            errors = [getattr(numbers, f"{name}_se", math.nan) for numbers in of_seed]
            mean = np.mean([getattr(numbers, name) for numbers in of_seed])
            if not math.isnan(mean):
                found.append((float(mean), math.hypot(*errors) / len(errors)))
    if not found:
        return None
    means = [value for value, _ in found]
    return float(np.mean(means)), float(np.std(means, ddof=1)) if len(means) > 1 else found[0][1]


def _precision_coverage(methods: Sequence[Method], folder: Path) -> list[Path]:
    panels = []
    for benchmark in _benchmarks(methods):
        lines = [_mean_coverage(method, benchmark) for method in methods]
        if drawn := [line for line in lines if line]:
            panels.append(Panel(benchmark, _COVERAGE, drawn, y_label="precision"))
    if not panels:
        raise _Absent("no response has a log-prob.")
    spreads = f" {_spreads(methods)}" if any(len(method.evaluated) > 1 for method in methods) else ""
    note = f"Beside each line: area under risk over coverage (AURC; less is better).{spreads}"
    return draw(panels, _styles(methods), folder / "coverage", note)


def _mean_coverage(method: Method, benchmark: str) -> Line | None:
    """Mean over seeds, with their standard deviation."""
    found = [seed.measured[benchmark] for seed in method.evaluated if benchmark in seed.tables]
    curves = [
        _enough(numbers.coverage, numbers.precision, numbers.scored) for numbers in found if len(numbers.coverage)
    ]
    if not curves:
        return None
    grid = np.linspace(max(coverage[0] for coverage, _ in curves), 1.0, 200)
    values = np.array([np.interp(grid, *curve) for curve in curves])
    band = values.std(axis=0, ddof=1) if len(curves) > 1 else None
    area = np.nanmean([numbers.aurc for numbers in found])
    return Line(method.label, grid, values.mean(axis=0), band, f"{method.label} {area:.3f}", marked=False)


def _scaling(methods: Sequence[Method], folder: Path) -> list[Path]:
    """Table 1: accuracy of one answer selected among N samples."""
    rows = [row for benchmark in _benchmarks(methods) for method in methods for row in _selected(method, benchmark)]
    if not rows:
        raise _Absent("no records have extracted answers to choose among.")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["benchmark", "model", "selection", "n", "accuracy", "sd", "seeds"])
    for benchmark, label, selection, values, sd, seeds in rows:
        for n, value in enumerate(values, start=1):
            spread = "" if seeds == 1 else sd[n - 1]
            writer.writerow([benchmark, label, selection.upper(), n, value, spread, seeds])
    most = max(len(values) for _, _, _, values, _, _ in rows)
    shown = [n for n in range(1, most + 1) if n & (n - 1) == 0 or n == most]
    lines = [
        [benchmark, label, selection.upper(), *(_cell(values, sd, seeds, n) for n in shown)]
        for benchmark, label, selection, values, sd, seeds in rows
    ]
    table = markdown(["benchmark", "model", "selection", *(f"N={n}" for n in shown)], lines)
    legend = (
        "Accuracy of one answer selected among N samples. SC: majority. PPL: the likeliest response. PC, RPC:\n"
        "Perplexity Consistency, without and with pruning (arXiv 2502.00511). ±: standard deviation over seeds."
    )
    paths = [folder / "scaling.md", folder / "scaling.csv"]
    make_folder(folder)
    write_text(paths[0], f"{table}\n\n{legend}\n")
    write_text(paths[1], text.getvalue())
    return paths


def _selected(method: Method, benchmark: str) -> Iterator[tuple[str, str, str, Floats, Floats, int]]:
    """(benchmark, label, selection, accuracy at N = 1..k, its sd, seeds) of each selection."""
    for selection in SELECTIONS:
        found = [seed.selected[benchmark] for seed in method.evaluated if benchmark in seed.tables]
        known = [each[selection] for each in found if selection in each]
        if known:
            k = min(map(len, known))
            values = np.array([each[:k] for each in known], dtype=float)
            if selection == "rpc":  # below that it is pc, of which more draws are known
                few = slice(FEWEST_TO_PRUNE - 1)
                values[:, few] = np.array([each["pc"][:k] for each in found if selection in each])[:, few]
            sd = values.std(axis=0, ddof=1) if len(known) > 1 else np.full(k, math.nan)
            yield benchmark, method.label, selection, values.mean(axis=0), sd, len(known)


def _cell(values: Floats, sd: Floats, seeds: int, n: int) -> str:
    if n > len(values) or math.isnan(values[n - 1]):
        return ""
    return f"{values[n - 1]:.3f}" if seeds == 1 else f"{values[n - 1]:.3f} ± {sd[n - 1]:.3f}"


def _benchmarks(methods: Sequence[Method]) -> list[str]:
    names = list(dict.fromkeys(name for method in methods for seed in method.seeds for name in seed.tables))
    if not names:
        raise _Absent("there are no evaluation records. Run `capo-megatron eval` on the runs, and with --base.")
    return sorted(names)


# --- ablations --------------------------------------------------------------------------------------------------------

_ABLATED = {
    "validation/accuracy": "Validation accuracy",
    "validation/auc_mean": "Validation AUC-mean",
    "policy/entropy": "Entropy, nats per token",
}


def _ablations(methods: Sequence[Method], folder: Path) -> list[Path]:
    """One figure for every option that some runs of an algorithm differ in alone; one for those that differ in more."""
    paths = []
    for kind in dict.fromkeys(method.kind for method in methods if method.kind != BASE):
        variants = [method for method in methods if method.kind == kind and any(_rows(method))]
        names = differing(variants)
        rest = list(variants)
        for option in names:
            families = _families(variants, option)
            rest = [method for method in rest if not any(method in family for family in families.values())]
            if families:
                paths += _ablation(families, [option], folder / f"ablation-{kind}-{short_name(option, names)}")
        if rest and len(variants) > 1:
            paths += _ablation({"": variants}, names, folder / f"ablation-{kind}")
    if not paths:
        raise _Absent("no two runs of one algorithm differ in their options.")
    return paths


def _families(variants: Sequence[Method], option: str) -> dict[str, list[Method]]:
    """What they share, in words -> methods that differ in this option alone, by its value."""
    others = [name for name in differing(variants) if name != option]
    found: dict[str, list[Method]] = {}
    for method in variants:
        found.setdefault(" ".join(describe(method.options, others)), []).append(method)
    return {
        title: sorted(family, key=lambda method: value_order(method, option))
        for title, family in found.items()
        if len(family) > 1
    }


def _ablation(families: Mapping[str, Sequence[Method]], names: Sequence[str], path: Path) -> list[Path]:
    """A row of panels for each family, titled by what it shares; lines are labelled by the options named."""
    panels: list[Panel] = []
    styles: dict[str, Style] = {}
    for title, family in families.items():
        styles |= ordered_styles([method.label for method in family])
        for key, heading in _ABLATED.items():
            lines = [_ablated(method, key, ", ".join(describe(method.options, names))) for method in family]
            if drawn := [line for line in lines if line]:
                panels.append(Panel(f"{heading}\n{title}" if len(families) > 1 else heading, _STEP, drawn))
    methods = [method for family in families.values() for method in family]
    alone = f" with {next(iter(families))}" if len(families) == 1 and any(families) else ""
    return draw(panels, styles, path, f"{methods[0].title}{alone}. {_spreads(methods)}") if panels else []


def _ablated(method: Method, key: str, title: str) -> Line | None:
    if key.startswith("validation/"):
        return _over_steps(method.label, _rows(method), key.removeprefix("validation/"), title=title)
    line = _series(method.label, _rows(method), key)
    return line and replace(line, label=f"{title} {line.y[-1]:.3f}")


# --- Fig. 2 -----------------------------------------------------------------------------------------------------------


def _advantage_gap(methods: Sequence[Method], folder: Path) -> list[Path]:
    """Advantage of a right answer minus that of a wrong one, in a group of these two, over their gap in log-prob."""
    score = torch.stack([torch.from_numpy(_GAPS), torch.zeros(len(_GAPS), dtype=torch.float64)], dim=1).flatten()
    correct = torch.tensor([True, False]).repeat(len(_GAPS))
    group = torch.arange(len(_GAPS)).repeat_interleave(2)

    def line(name: str, advantage: torch.Tensor) -> Line:
        pairs = advantage.reshape(-1, 2).numpy()
        return Line(name, _GAPS, pairs[:, 0] - pairs[:, 1], None, name)

    lines = [line("grpo", grpo_advantage(correct.double(), group))]
    variants = _capo_variants(methods)
    lines += [line(name, capo_advantage(score, correct, group, **options)) for name, options in variants.items()]
    lines = [Line(one.name, one.x, one.y, None, "GRPO" if one.name == "grpo" else one.name) for one in lines]
    styles = assign_styles(["grpo"]) | ordered_styles(list(variants))
    panel = Panel(
        "Advantage gap of a right and a wrong answer",
        "log-prob of the right answer minus that of the wrong one, nats per token",
        lines,
        y_label="difference of their advantages",
    )
    return draw(
        [panel],
        styles,
        folder / "gap",
        "In a group of one right and one wrong answer.",
    )


def _capo_variants(methods: Sequence[Method]) -> dict[str, dict[str, Any]]:
    """Label -> options of `capo_advantage`: those of the runs, or tau as in the paper."""
    names = ("tau", "surrogate", "norm", "inv_tau", "weight_floor", "mass_exponent")
    found: list[dict[str, Any]] = []
    runs = [method for method in methods if method.kind == "capo" and "algorithm.tau" in method.options]
    for method in sorted(runs, key=lambda method: value_order(method, "algorithm.tau")):
        options = {name: method.options[f"algorithm.{name}"] for name in names if f"algorithm.{name}" in method.options}
        if options not in found:
            found.append(options)
    found = found or [{"tau": tau} for tau in _TAUS]
    differ = [name for name in names if len({repr(options.get(name)) for options in found}) > 1]
    return {" ".join(["CAPO", *describe(options, differ or ["tau"])]): options for options in found}


# --- what figures share -----------------------------------------------------------------------------------------------


def _rows(method: Method) -> list[Rows]:
    return [seed.rows for seed in method.seeds if seed.rows]


def _styles(methods: Sequence[Method]) -> dict[str, Style]:
    """Label -> style. An algorithm that is there once looks as it does everywhere."""
    kinds = [method.kind for method in methods]
    names = [method.kind if kinds.count(method.kind) == 1 else method.label for method in methods]
    found = assign_styles(names)
    return {method.label: found[name] for method, name in zip(methods, names, strict=True)}


def _spreads(methods: Sequence[Method]) -> str:
    """What bands and bars are, in words."""
    counts = sorted({len(method.seeds) for method in methods})
    if counts[-1] == 1:
        return "Spread: one standard error over questions."
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    single = "; of a single run, one standard error over questions" if counts[0] == 1 else ""
    return f"Mean of {seeds} seeds. Spread: their standard deviation{single}."


FIGURES = {
    "accuracy-auc": Figure(_accuracy_auc),  # Fig. 1a, 3, 5
    "calibration": Figure(_validation({"auc_mean": "AUC-mean", "auc_pooled": "pooled AUC"}, "calibration")),  # 1b, c
    "gap": Figure(_advantage_gap, needs_runs=False),  # 2
    "coverage": Figure(_precision_coverage),  # 4
    "accuracy": Figure(_validation({"accuracy": "accuracy"}, "accuracy")),  # 6
    "ablation": Figure(_ablations),  # 7, 8, 9
    "trajectory": Figure(_trajectory),
    "scaling": Figure(_scaling),  # Table 1
}
