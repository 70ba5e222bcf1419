"""The report as one HTML file: static tables and sentences, compressed data, and the scripts that draw it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from tempfile import TemporaryFile
from typing import Any

from capo_megatron.errors import CapoError, DataError
from capo_megatron.evaluation.gather import Run, open_runs, training_samples
from capo_megatron.evaluation.records import read_records
from capo_megatron.evaluation.report import figures
from capo_megatron.evaluation.report.figures import Evaluation
from capo_megatron.evaluation.report.findings import (
    Finding,
    Judgement,
    against_each_other,
    count,
    decimal,
    describe_alone,
    judge,
    judge_validation,
    percent,
)
from capo_megatron.evaluation.report.samples import MOST_SAMPLES, Samples, element, to_ascii
from capo_megatron.runlog import make_folder, writing
from capo_megatron.types import EvalRecord

Colour = int | str  # the class of an element is "c" and this, see page.css

_ASSETS = files("capo_megatron.evaluation.report") / "assets"
_SCRIPTS = ("start.js", "charts.js", "samples.js", "page.js")
_KATEX = ("katex.min.js", "auto-render.min.js")
_COLOURS = 6  # of runs, see page.css; more than that share them and differ by dashes
_NONE = "\N{EN DASH}"  # in a cell of a table
_OWN_TO_EACH = ("output", "started", "command")  # what no two runs share
_OWN_COLOUR = {"capo": 0, "grpo": 1}  # as in the figures, where nothing else has it


def write_report(runs: Sequence[Path], destination: Path, *, samples: int = MOST_SAMPLES) -> Path:
    """Write one self-contained HTML file about these runs; its path.

    `runs` are run folders or records files (jsonl); the models of several are compared on the questions they share.
    About `samples` responses of each evaluation, if it has more, can be read on the page, in whole questions evenly
    spread; the numbers are of all. What a folder lacks is said on the page. Raises DataError if there is no run, or a
    records file cannot be read; CapoError if the page cannot be written.
    """
    destination = Path(destination)
    if destination.exists() and not destination.is_file():
        raise CapoError(
            f"{destination}: is a folder or a device. Name a file to write, such as {destination / 'report.html'}."
        )
    if samples < 1:
        raise CapoError(f"report: samples={samples}: must be 1 or more.")
    found = open_runs(runs)
    folder = destination.resolve().parent
    make_folder(folder)
    with writing(destination), TemporaryFile(dir=folder) as spool:
        texts = Samples(spool)
        evaluations = _evaluations(found, texts, samples)
        for run in found:
            texts.add_training(f"{run.name}, while training", training_samples(run))
        _write(destination, _page(found, evaluations, texts))
    return destination


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """Replace `path` as a whole, whatever its size. A link stays, and what it leads to is replaced."""
    path = path.resolve()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.writelines(parts)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


# --- reading evaluations ----------------------------------------------------------------------------------------------


def _evaluations(runs: Sequence[Run], texts: Samples, most: int) -> list[Evaluation]:
    """The evaluations of all runs, the bases first. Of equal files (the base that runs share) one is taken."""
    found: list[Evaluation] = []
    seen: set[bytes] = set()
    for index, run in enumerate(runs):
        for path in run.record_files:
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").digest()
                if digest not in seen:
                    found += _read(run, index, path, texts, most)
                seen.add(digest)
            except (OSError, CapoError) as error:
                if not run.is_folder:
                    raise error if isinstance(error, CapoError) else DataError(f"{path}: {error.strerror}.") from error
                run.missing.append(f"{path.name} left out: {str(error).removeprefix(f'{path}: ')}")
    labels = _plain_labels(runs, found)
    texts.rename(labels)
    found = [replace(one, label=labels.get(one.label, one.label)) for one in found]
    return [one for one in found if one.is_base] + [one for one in found if not one.is_base]


def _plain_labels(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> dict[str, str]:
    """Shorter labels where nothing else has them: "base" for the only base, a run's name for its only other model."""
    bases = [one for one in evaluations if one.is_base]
    found = {bases[0].label: "base"} if len(bases) == 1 else {}
    for index, run in enumerate(runs):
        own = [one for one in evaluations if one.run == index and not one.is_base]
        if len(own) == 1 and run.name != "base":
            found[own[0].label] = run.name
    return found


def _read(run: Run, index: int, path: Path, texts: Samples, most: int) -> list[Evaluation]:
    """The evaluations in a records file: usually one."""
    by_model: dict[tuple[str, int], list[EvalRecord]] = {}
    for record in read_records(path):
        by_model.setdefault((record.model, record.step), []).append(record)
    found = []
    for (model, step), records in by_model.items():
        is_base = model == "base" or (run.is_folder and step == 0)
        label = _label(run, model, step, is_base, len(by_model) > 1)
        found.append(Evaluation.of(label, index, is_base, records))
        texts.add(label, records, most)
    return found


def _label(run: Run, model: str, step: int, is_base: bool, several: bool) -> str:
    if run.is_folder:
        return f"{run.name} base" if is_base else f"{run.name} step {step}"
    return f"{run.name}: {model} step {step}" if several else run.name


def _judgements(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> tuple[list[Judgement], list[Finding]]:
    """What is said of each run, and of the final models against each other."""
    finals = []
    for index in range(len(runs)):
        trained = [one for one in evaluations if one.run == index and not one.is_base]
        finals += [max(trained, key=lambda one: one.step)] if trained else []
    said = []
    reference = evaluations[0] if evaluations else None
    for index, run in enumerate(runs):
        own = next((one for one in evaluations if one.run == index and one.is_base), reference)
        final = next((one for one in finals if one.run == index), None)
        if final is not None and own is not None and own is not final:
            said.append(judge(own, final, run))
        elif final is not None:
            said.append(describe_alone(final, run))
        elif run.is_folder:
            said.append(judge_validation(run, index))
        elif own is not None and not finals:
            said.append(describe_alone(own, run))
    compared = [one for one in finals if one is not reference]
    return said, against_each_other(compared)


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(runs: Sequence[Run], evaluations: Sequence[Evaluation], texts: Samples) -> Iterator[bytes]:
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    katex = "\n".join(_asset(f"katex/{name}") for name in _KATEX)
    colours = _colours(runs, evaluations)
    judged, between = _judgements(runs, evaluations)
    theme = _asset("theme.js")
    template = Template(_asset("page.html"))
    yield _encode(
        template.substitute(
            policy=_policy(theme, script, katex),
            theme=theme,
            title=_text(" · ".join(run.name for run in runs)),
            style=_asset("page.css"),
            runs="".join(_run_chip(run, colours[index]) for index, run in enumerate(runs)),
            judgements="".join(_judgement(one, colours[one.colour]) for one in judged),
            between=_findings(between, "Side by side"),
            models=_models(evaluations, colours),
            missing=_missing(runs),
            differences=_differences(runs),
            settings=_settings(runs),
            samples=count(len(texts)),
            data=element("charts", to_ascii(_charts(runs, evaluations, colours)))
            + element("katex", katex.encode("utf-8")),
            script=script,
        )
    )
    yield from texts.elements()
    yield b"</body>\n</html>\n"


def _policy(*scripts: str) -> str:
    """What the page may do: run these scripts. It may fetch nothing, and nothing else in it can run."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{found}'" for found in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _colours(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> list[Colour]:
    """A colour for each run: an algorithm's own where it is free, else the next; grey for files of the base alone."""
    taken: list[Colour] = []
    for index, run in enumerate(runs):
        if not run.is_folder and all(one.is_base for one in evaluations if one.run == index):
            taken.append("base")
            continue
        kind = run.config.get("algorithm.kind", run.name.rpartition("/")[2])
        own = _OWN_COLOUR.get(kind, -1) if isinstance(kind, str) else -1
        free = [colour for colour in range(_COLOURS) if colour not in taken]
        reserved = [colour for colour in free if colour not in _OWN_COLOUR.values()] or free
        taken.append(own if own in free else (reserved or [len(taken) % _COLOURS])[0])
    return taken


def _charts(runs: Sequence[Run], evaluations: Sequence[Evaluation], colours: Sequence[Colour]) -> dict[str, Any]:
    def drawn(groups: Iterable[tuple[str, str, Mapping[str, str]]]) -> list[dict[str, Any]]:
        found = []
        for title, unit, metrics in groups:
            lines = [
                {"name": _line_name(run, label), "colour": colours[index], "dash": dash + index // _COLOURS} | line
                for index, run in enumerate(runs)
                for dash, (metric, label) in enumerate(metrics.items())
                if (line := figures.curve(run, metric)) is not None
            ]
            if lines:
                found.append({"title": title, "unit": unit, "lines": lines})
        return found

    edges = figures.histogram_edges(evaluations)
    return {
        "curves": drawn(figures.CURVES),
        "masks": drawn(figures.MASK_CURVES),
        "trajectories": [
            {"name": run.name, "colour": colours[index]} | line
            for index, run in enumerate(runs)
            if (line := figures.trajectory(run)) is not None
        ],
        "evaluations": [
            {
                "name": one.label,
                "colour": "base" if one.is_base else colours[one.run],
                "accuracy": _known(one.summary["accuracy"]),
                "ece": _known(one.summary["ece"]),
                "reliability": figures.reliability(one),
                "histogram": figures.histogram(one, edges),
                "coverage": figures.coverage(one),
            }
            for one in evaluations
        ],
        "timings": [
            {
                "name": run.name,
                "steps": sum("seconds/step" in row for row in run.rows),
                "seconds": figures.phase_seconds(run),
                "throughput": figures.throughput(run),
            }
            for run in runs
            if figures.phase_seconds(run)
        ],
    }


def _line_name(run: Run, label: str) -> str:
    return f"{run.name} {label}".rstrip()


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- static parts -----------------------------------------------------------------------------------------------------


def _run_chip(run: Run, colour: Colour) -> str:
    algorithm = run.config.get("algorithm.kind")
    said = [str(algorithm)] if algorithm and str(algorithm) != run.name else []
    said += [f"step {run.last_step}"] if run.last_step is not None else []
    note = f' <span class="muted">{_text(", ".join(said))}</span>' if said else ""
    return f'<li><span class="swatch c{colour}"></span>{_text(run.name)}{note}</li>'


def _judgement(one: Judgement, colour: Colour) -> str:
    numbers = "".join(
        f"<div><dt>{_text(figure.name)}</dt><dd>{_arrow(figure.before, figure.after)}"
        f'<span class="note">{_text(figure.note)}</span></dd></div>'
        for figure in one.figures
    )
    return (
        f'<article class="card {one.tone}"><p class="who"><span class="swatch c{colour}"></span>{_text(one.name)}</p>'
        f"<h3>{_text(one.headline)}</h3>{f'<dl class=figures>{numbers}</dl>' if numbers else ''}"
        f"{_finding_list(one.findings)}</article>"
    )


def _arrow(before: str, after: str) -> str:
    was = f'<span class="was">{_text(before)}</span><span class="to" aria-label="to">→</span>'
    return f'<span class="value">{was if before else ""}<strong>{_text(after)}</strong></span>'


def _findings(found: Sequence[Finding], title: str) -> str:
    return f'<article class="card plain full"><h3>{title}</h3>{_finding_list(found)}</article>' if found else ""


def _finding_list(found: Sequence[Finding]) -> str:
    marks = {"good": "✓", "bad": "✕", "warn": "!", "plain": "·"}
    items = (
        f'<li class="{one.tone}"><span class="mark" aria-hidden="true">{marks[one.tone]}</span>{_text(one.text)}</li>'
        for one in found
    )
    return f'<ul class="findings">{"".join(items)}</ul>' if found else ""


def _models(evaluations: Sequence[Evaluation], colours: Sequence[Colour]) -> str:
    if not evaluations:
        return '<p class="empty">There are no evaluation records, so there is nothing to compare here.</p>'
    reference = evaluations[0]
    head = [
        "model",
        "accuracy",
        "pass@n",
        "AUC-mean",
        "mixed questions",
        f"paired AUC vs {reference.label}",
        "pooled AUC",
        "ECE",
        "Brier",
        "tokens",
        "cut off",
    ]
    rows = [
        [
            one.label,
            f"{percent(one.summary['accuracy'])} ± {percent(one.summary['accuracy_se']).removesuffix(' %')}",
            percent(one.summary["pass_at_n"]),
            f"{decimal(one.summary['auc_mean'])} ± {decimal(one.summary['auc_mean_se'])}",
            f"{count(one.summary['auc_questions'])} of {count(one.summary['questions'])}",
            _paired(reference, one),
            *(decimal(one.summary[name]) for name in ("auc_pooled", "ece", "brier")),
            f"{one.summary['tokens']:,.1f}",
            percent(one.summary["truncated"]),
        ]
        for one in evaluations
    ]
    table = _table("Models", head, rows, [_swatch(one, colours) for one in evaluations])
    by_benchmark = [
        [name, one.label, *_benchmark_row(numbers)] for one in evaluations for name, numbers in one.benchmarks.items()
    ]
    if not by_benchmark:
        return table
    by_benchmark.sort(key=lambda row: row[0])
    head = ["benchmark", "model", "questions", "accuracy", "AUC-mean", "mixed", "pooled AUC", "ECE", "cut off"]
    return f"{table}<h3>By benchmark</h3>{_table('Models by benchmark', head, by_benchmark)}"


def _benchmark_row(numbers: Mapping[str, float]) -> list[str]:
    return [
        count(numbers["questions"]),
        f"{percent(numbers['accuracy'])} ± {percent(numbers['accuracy_se']).removesuffix(' %')}",
        f"{decimal(numbers['auc_mean'])} ± {decimal(numbers['auc_mean_se'])}",
        count(numbers["auc_questions"]),
        decimal(numbers["auc_pooled"]),
        decimal(numbers["ece"]),
        percent(numbers["truncated"]),
    ]


def _paired(reference: Evaluation, one: Evaluation) -> str:
    if one is reference:
        return ""
    paired = figures.on_common_ground(reference, one)
    return f"{decimal(paired.value_a)} → {decimal(paired.value_b)} ({paired.n_valid:,})" if paired.n_valid else _NONE


def _swatch(one: Evaluation, colours: Sequence[Colour]) -> str:
    return f'<span class="swatch c{"base" if one.is_base else colours[one.run]}"></span>'


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], marks: Sequence[str] = ()) -> str:
    """A table of texts that scrolls sideways; `marks` is markup before the first cell of each row."""
    header = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{marks[index] if marks else ""}{_text(row[0])}</th>'
        + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return (
        f'<div class="scroll" role="region" aria-label="{_text(caption)}" tabindex="0"><table>'
        f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _missing(runs: Sequence[Run]) -> str:
    items = "".join(
        f'<li class="warn"><span class="mark" aria-hidden="true">!</span><strong>{_text(run.name)}</strong>: '
        f"{_text(sentence)}</li>"
        for run in runs
        for sentence in run.missing
    )
    return f'<h3>What is missing</h3><ul class="findings">{items}</ul>' if items else ""


def _differences(runs: Sequence[Run]) -> str:
    """The settings and versions in which runs differ."""
    folders = [run for run in runs if run.is_folder]
    if len(folders) < 2:
        return '<p class="empty">Name several runs to see in which settings they differ.</p>'
    rows = []
    for of in (lambda run: run.config, lambda run: run.made_with):
        names = dict.fromkeys(name for run in folders for name in of(run))
        for name in names:
            values = [_value(of(run), name) for run in folders]
            if len(set(values)) > 1 and name not in _OWN_TO_EACH:
                rows.append([name, *values])
    if not rows:
        return '<p class="empty">All settings and versions are equal.</p>'
    return _table("Settings that differ", ["setting", *(run.name for run in folders)], rows)


def _settings(runs: Sequence[Run]) -> str:
    """Everything that each run was made with, folded away."""
    found = []
    for run in runs:
        known = run.config | run.made_with
        if known:
            rows = [[name, _value(known, name)] for name in known]
            table = _table(f"Settings of {run.name}", ("setting", "value"), rows)
            found.append(f"<details><summary>All settings of {_text(run.name)}</summary>{table}</details>")
    return "".join(found)


def _value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return _NONE
    value = values[name]
    return value if isinstance(value, str) else json.dumps(value, default=str)


# --- text -------------------------------------------------------------------------------------------------------------


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _text(text: str) -> str:
    """`text` as HTML that shows it, also characters that cannot be seen or that turn others around."""
    return html.escape(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", errors="backslashreplace")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
