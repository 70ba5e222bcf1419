"""What a person sees of a run: one line a step and, on a terminal, a live line with phase and time left."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# metric -> label and format in the step's line; what a step does not have is left out
HEADLINE = {
    "reward/mean": ("reward", ".3f"),
    "reward/accuracy": ("acc", ".3f"),
    "calibration/auc_mean": ("auc", ".3f"),
    "response/length": ("len", ".0f"),
    "train/loss": ("loss", ".3g"),
    "policy/entropy": ("entropy", ".3f"),
    "train/grad_norm": ("grad", ".3g"),
    "train/lr": ("lr", ".2g"),
    "engine/gap_median": ("gap", ".4f"),
    "validation/accuracy": ("val acc", ".3f"),
    "validation/auc_mean": ("val auc", ".3f"),
    "tokens_per_second/step": ("tok/s", ",.0f"),
}


def step_line(step: int, total: int, metrics: Mapping[str, float], seconds: float, left: float | None) -> str:
    """`step  12/120  reward 0.512  acc 0.512  ...  3.1s  eta 5m40s`."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    parts += [f"{label} {metrics[name]:{form}}" for name, (label, form) in HEADLINE.items() if name in metrics]
    parts.append(duration(seconds))
    if left is not None:
        parts.append(f"eta {duration(left)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """3.1s, 5m40s, 2h05m, 3d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


class PlainDisplay:
    """One printed line a step, for files and pipes."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total

    def phase(self, name: str) -> None:
        """Hear which phase begins."""

    def step(self, step: int, metrics: Mapping[str, float], seconds: float, left: float | None) -> None:
        self._print(step_line(step, self._total, metrics, seconds, left))

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class LiveDisplay(PlainDisplay):
    """The same lines scrolling by above a progress bar that shows the phase and the time left."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console, total)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("starting", total=total, left="")
        self._progress.start()

    def phase(self, name: str) -> None:
        self._progress.update(self._task, description=f"{escape(name):<10}")

    def step(self, step: int, metrics: Mapping[str, float], seconds: float, left: float | None) -> None:
        super().step(step, metrics, seconds, left)
        eta = "" if left is None else f"eta {duration(left)}"
        self._progress.update(self._task, completed=step, left=eta)

    def close(self) -> None:
        self._progress.stop()


class NoDisplay(PlainDisplay):
    """Shows nothing but warnings."""

    def step(self, step: int, metrics: Mapping[str, float], seconds: float, left: float | None) -> None:
        """Nothing to see."""


def make_display(mode: str, total: int, console: Console | None = None) -> PlainDisplay:
    """The display for `LogConfig.console`; auto is live on a terminal that can move its cursor."""
    console = console or Console()
    if mode == "off":
        return NoDisplay(console, total)
    live = mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal)
    return LiveDisplay(console, total) if live else PlainDisplay(console, total)
