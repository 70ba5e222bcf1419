"""Figures from metrics and records, as PNG and SVG. The only file that imports matplotlib.

Colours are Okabe and Ito's, which colour-blind people tell apart; line style and marker repeat them for greyscale.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from capo_megatron.errors import DataError
from capo_megatron.evaluation.calibration import precision_coverage
from capo_megatron.evaluation.records import Columns
from capo_megatron.runlog import make_folder, writing
from capo_megatron.types import EvalRecord

Rows = Sequence[Mapping[str, Any]]

_Style = tuple[str, Any, str]  # colour, line, marker
_OWN: dict[str, _Style] = {  # what is drawn most often looks alike in every figure
    "base": ("#4D4D4D", (0, (1, 1.2)), "X"),
    "capo": ("#0072B2", "solid", "o"),
    "grpo": ("#D55E00", (0, (5, 1.5)), "s"),
}
_STYLES: tuple[_Style, ...] = (
    ("#009E73", (0, (4, 1, 1, 1)), "^"),
    ("#CC79A7", (0, (1, 1)), "D"),
    ("#E69F00", (0, (8, 2)), "v"),
    ("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "P"),
)
_FONT: Any = {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "svg.hashsalt": "capo_megatron"}
_BANDED = 4  # more lines than this are drawn without bands, which would hide them
_LABEL_HEIGHT = 0.062  # of a panel, in which a direct label needs its place
_FEWEST = 50  # responses, and
_LEAST = 0.01  # share of them, below which the precision of the most confident ones is mere noise


@dataclass(frozen=True)
class _Line:
    """One drawn line with what stands at its end."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    band: NDArray[np.float64] | None = None  # half width
    label: str = ""
    marked: bool = True


def training_figure(runs: Mapping[str, Rows], records: Mapping[str, Sequence[EvalRecord]], path: Path) -> list[Path]:
    """The files `path`.png and `path`.svg: accuracy and AUC-mean over training, and precision over coverage.

    `runs`: name -> rows of metrics.jsonl, of which those with `validation/...` are drawn, with bands of one standard
    error. `records`: name -> evaluation records; the name "base" is drawn in grey. A name looks alike in all panels.
    Raises DataError if there is nothing to draw, CapoError if the files cannot be written.
    """
    path = Path(path)
    panels = [
        ("Validation accuracy", "training step", [_over_steps(name, rows, "accuracy") for name, rows in runs.items()]),
        (
            "Validation AUC-mean",
            "training step",
            [_over_steps(name, rows, "auc_mean") for name, rows in runs.items()],
        ),
        (
            "Precision over coverage",
            "share of responses kept, most confident first",
            [_coverage(*item) for item in records.items()],
        ),
    ]
    drawn = [(title, label, [line for line in lines if line is not None]) for title, label, lines in panels]
    drawn = [panel for panel in drawn if panel[2]]
    if not drawn:
        raise DataError(f"{path}: nothing to draw: no run has validation metrics, and there are no evaluation records.")
    styles = _assign_styles([*runs, *records])
    with rc_context(_FONT):
        layout = ConstrainedLayoutEngine(wspace=0.06)
        figure = Figure(figsize=(4.6 * len(drawn), 3.9), dpi=150, facecolor="white", layout=layout)
        for axes, (title, label, lines) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            _draw(axes, title, label, lines, styles)
        return _save(figure, path)


def _assign_styles(names: Sequence[str]) -> dict[str, _Style]:
    others = [name for name in dict.fromkeys(names) if name not in _OWN]
    return _OWN | {name: _STYLES[index % len(_STYLES)] for index, name in enumerate(others)}


# --- lines ------------------------------------------------------------------------------------------------------------


def _over_steps(name: str, rows: Rows, metric: str) -> _Line | None:
    key = f"validation/{metric}"
    found = [row for row in rows if row.get(key) is not None]
    if not found:
        return None
    y = np.array([row[key] for row in found], dtype=float)
    band = np.array([row.get(f"{key}_se") for row in found], dtype=float)  # None becomes NaN
    label = f"{name} {y[-1]:.3f}"
    mixed = found[-1].get("validation/auc_questions")
    if metric == "auc_mean" and mixed is not None:
        label += f"\n{mixed:.0f} mixed"
    return _Line(name, np.array([row["step"] for row in found], dtype=float), y, band, label)


def _coverage(name: str, records: Sequence[EvalRecord]) -> _Line | None:
    columns = Columns.of(records)
    scored = ~np.isnan(columns.score)
    _, coverage, precision = precision_coverage(columns.score[scored], columns.correct[scored])
    total = int(scored.sum())
    enough = coverage * total >= min(max(_FEWEST, _LEAST * total), total) - 1e-6
    coverage, precision = coverage[enough], precision[enough]
    if not len(coverage):
        return None
    few = np.unique(np.searchsorted(coverage, np.linspace(coverage[0], 1, 300)).clip(max=len(coverage) - 1))
    return _Line(name, coverage[few], precision[few], None, f"{name} {precision[-1]:.3f}", marked=False)


# --- drawing ----------------------------------------------------------------------------------------------------------


def _draw(axes: Axes, title: str, label: str, lines: Sequence[_Line], styles: Mapping[str, _Style]) -> None:
    for line in lines:
        colour, dash, marker = styles[line.name]
        every = max(1, math.ceil(len(line.x) / 14)) if line.marked else max(1, len(line.x) // 6)
        axes.plot(
            line.x, line.y, color=colour, linestyle=dash, marker=marker, markersize=4, markevery=every, linewidth=1.7
        )
        if line.band is not None and len(lines) <= _BANDED:
            low, high = line.y - np.nan_to_num(line.band), line.y + np.nan_to_num(line.band)
            axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.set_title(title, loc="left")
    axes.set_xlabel(label)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.06)
    _label_ends(axes, lines, styles)


def _label_ends(axes: Axes, lines: Sequence[_Line], styles: Mapping[str, _Style]) -> None:
    """Write each line's label beside its end, moved up or down where labels would overlap."""
    low, high = axes.get_ylim()
    ends = [(float(line.y[-1]) - low) / (high - low) for line in lines]
    heights = [_LABEL_HEIGHT * (1 + line.label.count("\n")) for line in lines]
    right = axes.get_xlim()[1]
    for line, end, place in zip(lines, ends, spread(ends, heights), strict=True):
        colour = styles[line.name][0]
        axes.annotate(
            line.label,
            xy=((line.x[-1] - axes.get_xlim()[0]) / (right - axes.get_xlim()[0]), end),
            xytext=(1.05, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            va="center",
            linespacing=1.05,
            fontsize=9,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )


def spread(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Centres as near to `places` as boxes of these heights in [0, 1] can be without overlap, in the same order.

    Boxes that would overlap form a stack, which is centred on where its boxes want to be.
    """
    stacks: list[list[int]] = []
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        stacks.append([index])
        while len(stacks) > 1 and _bottom(stacks[-1], places, heights) < _top(stacks[-2], places, heights):
            stacks[-2:] = [stacks[-2] + stacks[-1]]
    found = list(places)
    for stack in stacks:
        edge = _bottom(stack, places, heights)
        for index in stack:
            found[index] = edge + heights[index] / 2
            edge += heights[index]
    return found


def _bottom(stack: Sequence[int], places: Sequence[float], heights: Sequence[float]) -> float:
    below = np.cumsum([0.0, *(heights[index] for index in stack)])
    wanted = np.mean([places[i] - heights[i] / 2 - low for i, low in zip(stack, below[:-1], strict=True)])
    return float(max(0.0, min(wanted, 1.0 - below[-1])))


def _top(stack: Sequence[int], places: Sequence[float], heights: Sequence[float]) -> float:
    return _bottom(stack, places, heights) + sum(heights[index] for index in stack)


def _save(figure: Figure, path: Path) -> list[Path]:
    make_folder(path.parent)
    saved = []
    for suffix, metadata in ((".png", {}), (".svg", {"Date": None})):
        image = io.BytesIO()
        figure.savefig(image, format=suffix[1:], metadata=metadata)
        target = path.with_name(path.name + suffix)
        with writing(target):
            target.write_bytes(image.getvalue())
        saved.append(target)
    return saved
