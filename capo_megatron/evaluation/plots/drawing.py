"""How figures look: lines and points with their labels beside them, as PNG and SVG. Only this file imports matplotlib.

Colours are Okabe and Ito's, which colour-blind people tell apart; line style and marker repeat them for greyscale.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from capo_megatron.runlog import make_folder, writing

Style = tuple[str, Any, str]  # colour, line, marker

_OWN: dict[str, Style] = {  # what is drawn most often looks alike in every figure
    "base": ("#4D4D4D", (0, (1, 1.2)), "X"),
    "capo": ("#0072B2", "solid", "o"),
    "grpo": ("#D55E00", (0, (5, 1.5)), "s"),
}
_STYLES: tuple[Style, ...] = (
    ("#009E73", (0, (4, 1, 1, 1)), "^"),
    ("#CC79A7", (0, (1, 1)), "D"),
    ("#E69F00", (0, (8, 2)), "v"),
    ("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "P"),
    # The same hues, darker.
    ("#00563F", (0, (2, 1)), "<"),
    ("#8A3766", (0, (6, 1, 1, 1, 1, 1)), ">"),
    ("#8C6100", (0, (10, 1.5, 2, 1.5)), "p"),
    ("#000000", (0, (1, 2)), "*"),
)
_FONT: Any = {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "svg.hashsalt": "capo_megatron"}
_WIDTH, _HEIGHT = 4.6, 3.9  # inches of a panel
_ABREAST = 3  # panels in a row
_ALONE = 6.2  # inches of a panel that is alone
_BANDED = 4  # more lines than this have a bar beside their end instead of bands, which would hide them
_LABEL_HEIGHT = 0.062  # of a panel, in which a direct label needs its place
_BARS = 0.07  # of a panel, between it and the labels, for bars
_NOTE_PITCH = 0.062  # inches of a character of the note
_LEGIBLE = 3.5  # contrast of text to white below which its colour is darkened


@dataclass(frozen=True)
class Line:
    """One drawn line with what stands at its end."""

    name: str  # key of its style
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    band: NDArray[np.float64] | None = None  # half width; NaN: unknown
    label: str = ""
    marked: bool = True


@dataclass(frozen=True)
class Point:
    """One drawn point with what stands near it, and the half widths of its error bars (NaN: none)."""

    name: str
    x: float
    y: float
    x_error: float
    y_error: float
    label: str
    trail: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # x and y of the way that led to it


@dataclass(frozen=True)
class Panel:
    """One pair of axes: lines, whose labels stand to the right, or points, whose labels stand near them."""

    title: str
    x_label: str
    lines: Sequence[Line] = ()
    points: Sequence[Point] = ()
    y_label: str = ""
    crosshair: tuple[float, float] | None = None  # dotted lines through this point


def assign_styles(names: Sequence[str]) -> dict[str, Style]:
    """Name -> its style: those that have their own, and the others in turn. More than eight of these share."""
    others = [name for name in dict.fromkeys(names) if name not in _OWN]
    return _OWN | {name: _STYLES[index % len(_STYLES)] for index, name in enumerate(others)}


def ordered_styles(names: Sequence[str]) -> dict[str, Style]:
    """Name -> style of a sweep in this order: from dark to light, evenly to the eye, also in greyscale."""
    lines = [style[1:] for style in (_OWN["capo"], _OWN["grpo"], *_STYLES)]
    shades = colormaps["viridis"](np.linspace(0, 0.82, len(names)))
    return {
        name: (to_hex(shade), *lines[index % len(lines)])
        for index, (name, shade) in enumerate(zip(names, shades, strict=True))
    }


def draw(panels: Sequence[Panel], styles: Mapping[str, Style], path: Path, note: str = "") -> list[Path]:
    """The files `path`.png and `path`.svg, with the panels in rows and the note below. Raises CapoError."""
    with rc_context(_FONT):
        return _save(compose(panels, styles, note), path)


def compose(panels: Sequence[Panel], styles: Mapping[str, Style], note: str = "") -> Figure:
    """The figure that `draw` saves."""
    columns = 2 if len(panels) == 4 else min(_ABREAST, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = _ALONE if note and len(panels) == 1 else _WIDTH * columns
    layout = ConstrainedLayoutEngine(wspace=0.06, hspace=0.05 if rows > 1 else None)
    figure = Figure(figsize=(width, _HEIGHT * rows), dpi=150, facecolor="white", layout=layout)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(places, panels, strict=False):
        _draw_points(axes, panel.points, styles)
        _draw_lines(axes, panel, styles)
    for axes in places[len(panels) :]:
        axes.remove()
    if note:
        note = "\n".join(textwrap.wrap(note, int(width / _NOTE_PITCH)))
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8.5, color="#4D4D4D")
    if any(panel.points for panel in panels):
        figure.draw_without_rendering()  # labels go where there is room, which shows when all else has its place
        for axes, panel in zip(places, panels, strict=False):
            _label_points(axes, panel.points, styles)
    return figure


# --- axes -------------------------------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, panel: Panel, styles: Mapping[str, Style]) -> None:
    lines = panel.lines
    banded = len(lines) <= _BANDED
    for line in lines:
        colour, dash, marker = styles[line.name]
        every = max(1, math.ceil(len(line.x) / 14)) if line.marked else max(1, len(line.x) // 6)
        axes.plot(
            line.x, line.y, color=colour, linestyle=dash, marker=marker, markersize=4, markevery=every, linewidth=1.7
        )
        if line.band is not None and banded:
            low, high = line.y - np.nan_to_num(line.band), line.y + np.nan_to_num(line.band)
            axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x_label)
    if panel.y_label:
        axes.set_ylabel(panel.y_label)
    axes.grid(axis="both" if panel.points else "y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.17 if panel.points else 0.02, y=0.13 if panel.points else 0.06)
    if panel.crosshair:
        axes.axvline(panel.crosshair[0], color="#4D4D4D", linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
        axes.axhline(panel.crosshair[1], color="#4D4D4D", linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
    barred = [] if banded else [line for line in lines if line.band is not None and not math.isnan(line.band[-1])]
    for index, line in enumerate(barred):
        axes.errorbar(
            1.02 + _BARS * index / len(barred), line.y[-1], float(line.band[-1]), color=styles[line.name][0],  # type: ignore[index]
            capsize=1.5, linewidth=1.1, fmt="none", transform=axes.get_yaxis_transform(), clip_on=False,
        )  # fmt: skip
    _label_ends(axes, lines, styles, 1.05 + _BARS * bool(barred))


def _draw_points(axes: Axes, points: Sequence[Point], styles: Mapping[str, Style]) -> None:
    for point in points:
        colour, dash, marker = styles[point.name]
        bars = (([-point.x_error, point.x_error], [0, 0]), ([0, 0], [-point.y_error, point.y_error]))
        for x, y in bars:  # NaN draws nothing
            axes.plot(point.x + np.array(x), point.y + np.array(y), color=colour, linewidth=1.0, alpha=0.6, zorder=2)
        axes.plot(
            point.x, point.y, color=colour, marker=marker, markersize=7.5, linestyle="none", markeredgecolor="white",
            markeredgewidth=0.6, zorder=3,
        )  # fmt: skip
        if point.trail:
            axes.plot(
                *point.trail, color=colour, linestyle=dash, linewidth=1.2, marker=marker, markersize=2.5, alpha=0.6
            )


# --- labels -----------------------------------------------------------------------------------------------------------


def _ink(colour: str) -> str:
    """The colour, dark enough for text."""
    rgb: tuple[float, float, float] = to_rgb(colour)
    while 1.05 / (0.05 + _luminance(rgb)) < _LEGIBLE:
        rgb = (rgb[0] * 0.95, rgb[1] * 0.95, rgb[2] * 0.95)
    return to_hex(rgb)


def _luminance(rgb: tuple[float, float, float]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _label_ends(axes: Axes, lines: Sequence[Line], styles: Mapping[str, Style], column: float) -> None:
    """Write each line's label beside its end, moved up or down where labels would overlap."""
    low, high = axes.get_ylim()
    ends = [(float(line.y[-1]) - low) / (high - low) for line in lines]
    heights = [_LABEL_HEIGHT * (1 + line.label.count("\n")) for line in lines]
    right = axes.get_xlim()[1]
    for line, end, place in zip(lines, ends, spread(ends, heights), strict=True):
        colour = _ink(styles[line.name][0])
        axes.annotate(
            line.label,
            xy=((line.x[-1] - axes.get_xlim()[0]) / (right - axes.get_xlim()[0]), end),
            xytext=(column, place),
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


def _label_points(axes: Axes, points: Sequence[Point], styles: Mapping[str, Style]) -> None:
    """Write each point's label near it, where it covers least of what is drawn and of the labels before it."""
    taken = [box for point in points for box in _boxes(axes, point)]  # (where, weight)
    pixel = 72 / axes.figure.dpi  # in points
    frame = axes.get_window_extent()
    for point in points:
        colour, (x, y) = _ink(styles[point.name][0]), axes.transData.transform((point.x, point.y))
        sized = axes.text(0, 0, point.label, fontsize=8.5)
        width, height = sized.get_window_extent().size
        sized.remove()
        candidates = []
        for radius, angle in product((7.0, 14.0, 24.0, 36.0, 50.0, 70.0), range(0, 360, 30)):
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            shift = across * (radius / pixel + width / 2), up * (radius / pixel + height / 2)
            box = Bbox.from_bounds(x + shift[0] - width / 2, y + shift[1] - height / 2, width, height)
            covered = sum(weight * _overlap(box, other) for other, weight in taken)
            outside = width * height - _overlap(box, frame)
            candidates.append((covered + 5 * outside + 0.01 * width * height * radius, radius, shift, box))
        _, radius, shift, box = min(candidates, key=lambda candidate: candidate[0])
        taken.append((box, 4.0))
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        text = axes.annotate(
            point.label, (point.x, point.y), (shift[0] * pixel, shift[1] * pixel), textcoords="offset points",
            color=colour, fontsize=8.5, ha="center", va="center", arrowprops=leader if radius > 10 else None, zorder=4,
        )  # fmt: skip
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])
        text.set_in_layout(False)


def _boxes(axes: Axes, point: Point) -> Iterator[tuple[Bbox, float]]:
    """Where the point, its error bars and its trail are, in pixels, and how much it matters that they are seen."""
    ends = np.nan_to_num([point.x_error, point.y_error])
    (left, low), (x, y), (right, high) = axes.transData.transform(
        [(point.x - ends[0], point.y - ends[1]), (point.x, point.y), (point.x + ends[0], point.y + ends[1])]
    )
    yield Bbox.from_extents(x - 9, y - 9, x + 9, y + 9), 4.0
    yield Bbox.from_extents(left, y - 3, right, y + 3), 1.0
    yield Bbox.from_extents(x - 3, low, x + 3, high), 1.0
    if point.trail:
        for x, y in axes.transData.transform(np.column_stack(point.trail)):
            yield Bbox.from_extents(x - 5, y - 5, x + 5, y + 5), 1.0


def _overlap(a: Bbox, b: Bbox) -> float:
    both = Bbox.intersection(a, b)
    return 0.0 if both is None else float(both.width * both.height)


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
