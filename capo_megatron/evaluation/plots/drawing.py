"""How figures look: lines and points with their labels beside them, as PNG and SVG. Only this file imports matplotlib.

Colours are Okabe and Ito's, which colour-blind people tell apart; line style and marker repeat them for greyscale.
"""

from __future__ import annotations

import io
import math
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
_BANDED = 4  # more lines than this are drawn with a bar at their end instead of bands, which would hide them
_LABEL_HEIGHT = 0.062  # of a panel, in which a direct label needs its place
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


def draw(
    panels: Sequence[Panel], styles: Mapping[str, Style], path: Path, note: str = "", abreast: int = _ABREAST
) -> list[Path]:
    """The files `path`.png and `path`.svg, with the panels in rows and the note below. Raises CapoError."""
    with rc_context(_FONT):
        return _save(compose(panels, styles, note, abreast), path)


def compose(panels: Sequence[Panel], styles: Mapping[str, Style], note: str = "", abreast: int = _ABREAST) -> Figure:
    """The figure that `draw` saves."""
    columns = min(abreast, len(panels))
    rows = math.ceil(len(panels) / columns)
    layout = ConstrainedLayoutEngine(wspace=0.06, **({"hspace": 0.05} if rows > 1 else {}))
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), dpi=150, facecolor="white", layout=layout)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(places, panels, strict=False):
        _draw_lines(axes, panel, styles)
        _draw_points(axes, panel.points, styles)
    for axes in places[len(panels) :]:
        axes.remove()
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8.5, color="#4D4D4D")
    if any(panel.points for panel in panels):
        figure.draw_without_rendering()  # labels go where there is room, which shows when all else has its place
        for axes, panel in zip(places, panels, strict=False):
            _label_points(axes, panel.points, styles)
    return figure


# --- axes -------------------------------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, panel: Panel, styles: Mapping[str, Style]) -> None:
    lines = panel.lines
    for line in lines:
        colour, dash, marker = styles[line.name]
        every = max(1, math.ceil(len(line.x) / 14)) if line.marked else max(1, len(line.x) // 6)
        axes.plot(
            line.x, line.y, color=colour, linestyle=dash, marker=marker, markersize=4, markevery=every, linewidth=1.7
        )
        if line.band is None:
            continue
        if len(lines) <= _BANDED:
            low, high = line.y - np.nan_to_num(line.band), line.y + np.nan_to_num(line.band)
            axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
        elif not math.isnan(line.band[-1]):
            axes.errorbar(line.x[-1], line.y[-1], line.band[-1], color=colour, capsize=2.5, linewidth=1.1, fmt="none")
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x_label)
    if panel.y_label:
        axes.set_ylabel(panel.y_label)
    axes.grid(axis="both" if panel.points else "y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.06)
    if panel.crosshair:
        axes.axvline(panel.crosshair[0], color="#4D4D4D", linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
        axes.axhline(panel.crosshair[1], color="#4D4D4D", linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
    _label_ends(axes, lines, styles)


def _draw_points(axes: Axes, points: Sequence[Point], styles: Mapping[str, Style]) -> None:
    for point in points:
        colour, _, marker = styles[point.name]
        bars = [None if math.isnan(error) else error for error in (point.x_error, point.y_error)]
        axes.errorbar(
            point.x, point.y, xerr=bars[0], yerr=bars[1], color=colour, marker=marker, markersize=7, linestyle="none",
            markeredgecolor="white", markeredgewidth=0.6, elinewidth=1.0, capsize=2, zorder=3,
        )  # fmt: skip
        if point.trail:
            x, y = point.trail
            axes.plot(x, y, color=colour, linestyle=styles[point.name][1], linewidth=1.1, alpha=0.75, zorder=2)
            axes.plot(
                x[:-1], y[:-1], color=colour, linestyle="none", marker=marker, markersize=2.8, alpha=0.75, zorder=2
            )
    if points:
        axes.margins(x=0.14, y=0.12)  # for the labels


# --- labels -----------------------------------------------------------------------------------------------------------


def _ink(colour: str) -> str:
    """The colour, dark enough for text."""
    rgb = np.array(to_rgb(colour))
    while 1.05 / (0.05 + _luminance(rgb)) < _LEGIBLE:
        rgb = rgb * 0.95
    return to_hex(rgb)


def _luminance(rgb: NDArray[np.float64]) -> float:
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _label_ends(axes: Axes, lines: Sequence[Line], styles: Mapping[str, Style]) -> None:
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


def _label_points(axes: Axes, points: Sequence[Point], styles: Mapping[str, Style]) -> None:
    """Write each point's label near it, where it covers least of what is drawn and of the labels before it."""
    taken = [box for point in points for box in _boxes(axes, point)]
    pixel = 72 / axes.get_figure(root=True).dpi  # in points
    for point in points:
        colour, (x, y) = _ink(styles[point.name][0]), axes.transData.transform((point.x, point.y))
        sized = axes.text(0, 0, point.label, fontsize=8.5, linespacing=1.05)
        width, height = sized.get_window_extent().size
        sized.remove()
        best, chosen, near = math.inf, (0.0, 0.0), True
        for radius, angle in product((7.0, 13.0, 22.0, 34.0, 50.0), range(0, 360, 30)):
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            shift = across * (radius / pixel + width / 2), up * (radius / pixel + height / 2)
            box = Bbox.from_bounds(x + shift[0] - width / 2, y + shift[1] - height / 2, width, height)
            outside = width * height - _overlap(box, axes.get_window_extent())
            cost = sum(_overlap(box, other) for other in taken) + 5 * outside + 0.02 * width * height * radius
            if cost < best:
                best, chosen, near, found = cost, shift, radius < 10, box
        taken.append(found)
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            point.label,
            (point.x, point.y),
            (chosen[0] * pixel, chosen[1] * pixel),
            textcoords="offset points",
            color=colour,
            fontsize=8.5,
            linespacing=1.05,
            ha="center",
            va="center",
            arrowprops=None if near else leader,
        ).set_in_layout(False)


def _boxes(axes: Axes, point: Point) -> Iterator[Bbox]:
    """Where the point, its error bars and its trail are, in pixels."""
    ends = np.nan_to_num([point.x_error, point.y_error])
    (left, low), (x, y), (right, high) = axes.transData.transform(
        [(point.x - ends[0], point.y - ends[1]), (point.x, point.y), (point.x + ends[0], point.y + ends[1])]
    )
    yield Bbox.from_extents(x - 9, y - 9, x + 9, y + 9)
    yield Bbox.from_extents(left, y - 2, right, y + 2)
    yield Bbox.from_extents(x - 2, low, x + 2, high)
    if point.trail:
        for x, y in axes.transData.transform(np.column_stack(point.trail)):
            yield Bbox.from_extents(x - 5, y - 5, x + 5, y + 5)


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
