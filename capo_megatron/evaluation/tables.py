"""What `metrics` found, as Markdown tables, JSON, or CSV with one number a line."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from capo_megatron.evaluation.comparison import markdown
from capo_megatron.evaluation.metrics import Measured
from capo_megatron.evaluation.paired import Match, Pairing

SCHEMA = 1
FORMATS = ("table", "json", "csv")

_ACCURACY = {"mean@k": "accuracy", "pass@k": "pass_at_k", "SC": "sc", "PPL": "ppl", "PC": "pc", "RPC": "rpc"}
_CALIBRATION = {
    "AUC-mean": "auc_mean",
    "pooled AUC": "auc_pooled",
    "ECE": "ece",
    "PCE": "pce",
    "MCE": "mce",
    "Brier": "brier",
    "AURC": "aurc",
    "E-AURC": "e_aurc",
    "precision@50%": "precision@0.5",
    "coverage@0.9": "coverage@0.9",
}
_ABSTENTION = {"answered": "answered", "precision": "answered_precision", "out of range": "out_of_range"}
_LEGEND = """\
mean@k: accuracy. AUC-mean: over the mixed questions, which have right and wrong answers: compare two models by paired
AUC. precision@50%: of the most confident half. coverage@0.9: share that can be answered with that precision. Intervals
and p-values are over questions."""


@dataclass(frozen=True)
class Findings:
    """Everything that one call of `metrics` found."""

    confidence: str
    groups: Sequence[Measured]
    pairs: Sequence[Pairing] = ()
    matches: Sequence[Match] = ()

    def render(self, form: str) -> str:
        """The text in one of FORMATS, with a line's end."""
        return {"table": _as_table, "json": _as_json, "csv": _as_csv}[form](self)


# --- for people -----------------------------------------------------------------------------------------------------


def _as_table(found: Findings) -> str:
    parts = [_headline(found.groups, _ACCURACY, counts=True), _headline(found.groups, _CALIBRATION, counts=False)]
    if any(any(method in one.by_samples for method in ("sc", "pc")) for one in found.groups):
        parts.append(_by_samples(found.groups))
    if any("answered" in one.values for one in found.groups):
        parts.append(_headline(found.groups, _ABSTENTION, counts=False))
    if found.pairs:
        parts.append(_pairs(found.pairs))
    if found.matches:
        parts.append(_matches(found.matches))
    return "\n\n".join([*parts, f"confidence: {found.confidence}. {_LEGEND}"]) + "\n"


def _headline(groups: Sequence[Measured], names: Mapping[str, str], counts: bool) -> str:
    header = [*_keys(groups[0].group), *(["questions", "k"] if counts else ["mixed"]), *names]
    rows = []
    for one in groups:
        numbers = [_cell(one, name) for name in names.values()]
        if counts:
            first = [_whole(one.values.get("questions")), _whole(one.values.get("samples"))]
        else:
            first = [f"{_whole(one.values.get('auc_questions'))} of {_whole(one.values.get('questions'))}"]
        rows.append([*_names(one.group), *first, *numbers])
    return markdown(header, rows)


def _cell(one: Measured, name: str) -> str:
    value, error = one.values.get(name, math.nan), one.values.get(f"{name}_se", math.nan)
    if name in one.intervals:
        low, high = one.intervals[name]
        return f"{_number(value)} ({_number(low)} to {_number(high)})"
    return _number(value) if math.isnan(error) else f"{_number(value)} ± {_number(error)}"


def _by_samples(groups: Sequence[Measured]) -> str:
    most = max(len(one.by_samples.get("pass", ())) for one in groups)
    shown = [n for n in range(1, most + 1) if n & (n - 1) == 0 or n == most]
    rows = []
    for one in groups:
        for method, values in one.by_samples.items():
            numbers = [_number(values[n - 1]) if n <= len(values) else "" for n in shown]
            rows.append([*_names(one.group), "pass@N" if method == "pass" else method.upper(), *numbers])
    return markdown([*_keys(groups[0].group), "accuracy by", *(f"N={n}" for n in shown)], rows)


def _pairs(pairs: Sequence[Pairing]) -> str:
    rows = []
    for one in pairs:
        for each in one.differences:
            name = each.name
            if name == "auc_mean":
                name = "fixed-sample AUC" if one.same_responses else "paired AUC"
            interval = "" if math.isnan(each.low) else f" ({_number(each.low, '+')} to {_number(each.high, '+')})"
            both = f"{_number(each.first)} -> {_number(each.second)}"
            p = "" if math.isnan(each.p) else f"{each.p:.2g}"
            gain = f"{_number(each.difference, '+')}{interval}"
            rows.append([*_names(one.group), f"{one.first} -> {one.second}", name, str(each.questions), both, gain, p])
    return markdown([*_keys(pairs[0].group), "models", "number", "questions", "of both", "difference", "p"], rows)


def _matches(matches: Sequence[Match]) -> str:
    """The last step of each model beside the others; every step is in JSON and CSV."""
    last: dict[tuple[Any, ...], Match] = {}
    for one in matches:
        last[(*one.group.values(), one.model, one.other)] = one
    rows = []
    for one in last.values():
        never = one.other_step is None
        paired = f"{_number(one.paired, '+')} ± {_number(one.paired_se)} ({one.mixed_both})"
        rows.append(
            [
                *_names(one.group),
                f"{one.model}@{one.step}",
                f"{_number(one.accuracy)}, {_number(one.auc_mean)}",
                one.other if never else f"{one.other}@{one.other_step}",
                "never as accurate" if never else f"{_number(one.other_accuracy)}, {_number(one.other_auc_mean)}",
                "" if never else paired,
            ]
        )
    header = ["model", "accuracy, AUC-mean", "stopped at its accuracy", "accuracy, AUC-mean", "paired AUC (questions)"]
    return markdown([*_keys(matches[0].group), *header], rows)


def _keys(group: Mapping[str, str | int]) -> list[str]:
    return list(group) or ["records"]


def _names(group: Mapping[str, str | int]) -> list[str]:
    return [str(value) for value in group.values()] or ["all"]


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _number(value: float, sign: str = "") -> str:
    return "undefined" if math.isnan(value) else f"{value:{sign}.3f}"


# --- for programs ---------------------------------------------------------------------------------------------------


def _as_json(found: Findings) -> str:
    groups = [
        {
            "group": one.group,
            "values": one.values,
            "intervals": one.intervals,
            "by_samples": one.by_samples,
            "precision_coverage": one.curves,
        }
        for one in found.groups
    ]
    whole = {
        "schema": SCHEMA,
        "confidence": found.confidence,
        "groups": groups,
        "pairs": [asdict(one) for one in found.pairs],
        "accuracy_matched": [asdict(one) for one in found.matches],
    }
    return json.dumps(_finite(whole), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """NaN, which JSON lacks, becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_csv(found: Findings) -> str:
    """benchmark, step, model, other, metric, n, value, low, high, p; what does not apply is empty."""
    text = io.StringIO()
    columns = ["benchmark", "step", "model", "other", "metric", "n", "value", "low", "high", "p"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in _lines(found):
        writer.writerow({name: "" if isinstance(value, float) and math.isnan(value) else value for name, value in row})
    return text.getvalue()


def _lines(found: Findings) -> Iterator[list[tuple[str, Any]]]:
    for one in found.groups:
        for name, value in one.values.items():
            low, high = one.intervals.get(name, (math.nan, math.nan))
            yield [*one.group.items(), ("metric", name), ("value", value), ("low", low), ("high", high)]
        for method, values in one.by_samples.items():
            for n, value in enumerate(values, start=1):
                yield [*one.group.items(), ("metric", f"{method}_at_n"), ("n", n), ("value", value)]
    for pair in found.pairs:
        names = [*pair.group.items(), ("model", pair.first), ("other", pair.second)]
        for each in pair.differences:
            numbers = [("n", each.questions), ("value", each.difference), ("low", each.low), ("high", each.high)]
            yield [*names, ("metric", f"difference/{each.name}"), *numbers, ("p", each.p)]
    for match in found.matches:
        names = [*match.group.items(), ("step", match.step), ("model", match.model)]
        other = match.other if match.other_step is None else f"{match.other}@{match.other_step}"
        numbers = [("n", match.mixed_both), ("value", match.paired)]
        yield [*names, ("other", other), ("metric", "accuracy_matched/paired_auc"), *numbers]
