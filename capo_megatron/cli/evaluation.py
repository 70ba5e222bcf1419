"""The commands that work on what runs have written: `metrics`, `calibrate`, `report` and `plot`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from capo_megatron.cli.arguments import say, whole_number
from capo_megatron.errors import CapoError, ConfigError

_FIGURES = ("accuracy-auc", "calibration", "gap", "coverage", "accuracy", "ablation", "trajectory", "scaling")

Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_evaluation(command: Command) -> None:
    """Add the commands to the parser."""
    metrics = command(
        "metrics",
        _metrics,
        "accuracy and calibration from records: ours, verl's dumps, lm-evaluation-harness's samples",
    )
    _add_records(metrics)
    metrics.add_argument(
        "--group-by", default="benchmark,step,model", help="some of benchmark,step,model (default: all)"
    )
    metrics.add_argument("--bootstrap", type=whole_number, help="resamples of questions for 95 %% intervals, e.g. 1000")
    metrics.add_argument(
        "--base", metavar="MODEL[@STEP]", help="what the others are compared with (default: the first)"
    )
    metrics.add_argument("--fixed-sample", action="store_true", help="insist that all rated the same responses")
    metrics.add_argument("--abstain", type=Path, metavar="RULE", help="apply a rule that calibrate wrote")
    metrics.add_argument("--format", choices=("table", "json", "csv"), default="table")
    metrics.add_argument("--output", type=Path, help="file to write (default: the terminal)")

    calibrate = command("calibrate", _calibrate, "fit when to abstain, for a wanted precision; write the rule as JSON")
    _add_records(calibrate)
    calibrate.add_argument("--precision", type=float, required=True, help="wanted of the answers that are given")
    calibrate.add_argument("--method", choices=("threshold", "isotonic"), default="threshold")
    calibrate.add_argument("--output", type=Path, required=True, help="file for the rule")

    report = command("report", _report, "one HTML page of runs: verdicts, curves, calibration, every response")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a file of records")
    report.add_argument(
        "--output", type=Path, help="the page (default: report.html, of one run in its folder, of several here)"
    )
    report.add_argument("--samples", type=whole_number, default=100_000, help="responses at most (default 100,000)")

    plot = command("plot", _plot, "the figures of CAPO's paper, and its Table 1, from runs and records")
    plot.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a run's folder, or a file of records")
    plot.add_argument("--figures", default="", metavar="NAMES", help=f"some of {','.join(_FIGURES)} (default: all)")
    plot.add_argument("--output", type=Path, default=Path("figures"), help="folder (default: figures)")


def _add_records(added: argparse.ArgumentParser) -> None:
    added.add_argument("files", nargs="+", type=Path, metavar="FILE", help="records, one JSON object a line")
    added.add_argument(
        "--confidence", default="perplexity", help="perplexity (default), sum, lowest-K such as lowest-8, or stated"
    )


def _metrics(options: argparse.Namespace) -> int:
    from capo_megatron.evaluation import abstention
    from capo_megatron.evaluation.metrics import Confidence, measure
    from capo_megatron.evaluation.paired import match_accuracy, pair
    from capo_megatron.evaluation.table import read_table
    from capo_megatron.evaluation.tables import Findings

    confidence = Confidence.parse(options.confidence)
    rule = abstention.read_rule(options.abstain) if options.abstain else None
    if rule and rule.confidence != str(confidence):
        raise ConfigError(
            f"{options.abstain}: fitted on confidence {rule.confidence}, got {confidence}. "
            f"Use --confidence {rule.confidence}."
        )
    by = [name for name in options.group_by.split(",") if name]
    resamples = options.bootstrap or 0
    table = read_table(options.files, confidence.count)
    groups = measure(table, by, confidence, resamples)
    if rule:
        for one, (_, part) in zip(groups, table.split(by), strict=True):
            one.values.update(abstention.apply(rule, part))
    apart = "benchmark" in by
    pairs = pair(table, apart, options.base, confidence, resamples, options.fixed_sample)
    found = Findings(str(confidence), groups, pairs, match_accuracy(table, apart, confidence))
    _give(found.render(options.format), options.output)
    return 0


def _give(text: str, output: Path | None) -> None:
    from capo_megatron.runlog import write_text

    if output is None:
        say(text.rstrip("\n"))
    elif output.is_dir():
        raise CapoError(f"--output {output}: is a folder. Name a file in it.")
    else:
        write_text(output, text)


def _calibrate(options: argparse.Namespace) -> int:
    from capo_megatron.evaluation.abstention import fit, write_rule
    from capo_megatron.evaluation.metrics import Confidence
    from capo_megatron.evaluation.table import read_table

    confidence = Confidence.parse(options.confidence)
    rule = fit(read_table(options.files, confidence.count), options.precision, options.method, confidence)
    write_rule(options.output, rule)
    say(
        f"{options.output}: answers {rule.coverage:.3f} of {rule.responses} responses with a confidence, from "
        f"{rule.confidence} "
        f"{rule.threshold:.4g} on, with precision {rule.precision:.3f} ({rule.precision_low:.3f} to "
        f"{rule.precision_high:.3f})"
    )
    return 0


def _report(options: argparse.Namespace) -> int:
    from capo_megatron.evaluation.report import write_report

    alone = options.runs[0] if len(options.runs) == 1 and options.runs[0].is_dir() else Path()
    path = write_report(options.runs, options.output or alone / "report.html", samples=options.samples)
    say(f"report: {path}")
    return 0


def _plot(options: argparse.Namespace) -> int:
    from capo_megatron.evaluation.plots import plot_runs

    names = [name for name in options.figures.split(",") if name]
    paths, notes = plot_runs(options.runs, options.output, names)
    for line in (*notes, *(f"figure: {path}" for path in paths)):
        say(line)
    return 0
