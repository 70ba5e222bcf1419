"""What the numbers say, in words, and what to be careful about. Every sentence rests on a number beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from capo_megatron.evaluation.gather import Run
from capo_megatron.evaluation.report.figures import Change, Evaluation, changes

Tone = Literal["good", "bad", "warn", "plain"]

_FEW_MIXED = 50  # questions, below which an AUC-mean is not worth much
_TRUNCATED = 0.05
_UNGRADED = 0.01
_GAP = 2.0  # of exp |gap| at the 99th percentile, where engine and policy no longer are one model
_ENTROPY_LEFT = 0.1  # of the entropy at the start
_NO_GRADIENT = 0.8  # of the groups
_MANY = 4  # models, beyond which not every two are compared
_CLEAR = 1.96  # standard errors

_HEADLINES: dict[tuple[int, int | None], tuple[Tone, str]] = {  # signs of accuracy and of paired AUC
    (1, 1): ("good", "More accurate, and better calibrated"),
    (1, 0): ("good", "More accurate, and as calibrated as before"),
    (1, -1): ("bad", "More accurate, but worse calibrated"),
    (1, None): ("plain", "More accurate; calibration cannot be compared"),
    (0, 1): ("good", "As accurate as before, and better calibrated"),
    (0, 0): ("plain", "No measurable change"),
    (0, -1): ("bad", "As accurate as before, but worse calibrated"),
    (0, None): ("plain", "As accurate as before; calibration cannot be compared"),
    (-1, 1): ("warn", "Less accurate, but better calibrated"),
    (-1, 0): ("bad", "Less accurate, and as calibrated as before"),
    (-1, -1): ("bad", "Less accurate, and worse calibrated"),
    (-1, None): ("bad", "Less accurate; calibration cannot be compared"),
}


@dataclass(frozen=True)
class Finding:
    """One sentence or two."""

    tone: Tone
    text: str


@dataclass(frozen=True)
class Figure:
    """A number before and after, as text."""

    name: str
    before: str
    after: str
    note: str


@dataclass(frozen=True)
class Judgement:
    """What is said of one run or model."""

    name: str
    colour: int  # index of the run
    tone: Tone
    headline: str
    figures: tuple[Figure, ...]
    findings: tuple[Finding, ...]


def judge(before: Evaluation, after: Evaluation, run: Run) -> Judgement:
    """A model against the one it is compared with, on the questions that both answered."""
    accuracy, paired = changes(before, after)
    sign = accuracy.sign
    if sign is None:
        nothing = Finding("warn", f"It answered other questions than {before.label}: nothing can be compared.")
        return Judgement(after.label, after.run, "warn", "Not compared", (), (nothing, *_cautions(after, run)))
    tone, headline = _HEADLINES[sign, paired.sign]
    findings = [*_what_changed(before, after, accuracy, paired), *_cautions(after, run)]
    name = f"{after.label}, compared with {before.label}"
    return Judgement(name, after.run, tone, headline, _figures(before, after, accuracy, paired), tuple(findings))


def describe_alone(found: Evaluation, run: Run) -> Judgement:
    """A model that there is nothing to compare with."""
    numbers = found.summary
    figures = (
        Figure("Accuracy", "", percent(numbers["accuracy"]), f"± {percent(numbers['accuracy_se'])} standard error"),
        Figure("AUC-mean", "", decimal(numbers["auc_mean"]), f"± {decimal(numbers['auc_mean_se'])} standard error"),
        Figure("Mixed questions", "", count(numbers["auc_questions"]), f"of {count(numbers['questions'])}"),
    )
    return Judgement(found.label, found.run, "plain", "Evaluated once", figures, tuple(_cautions(found, run)))


def judge_validation(run: Run, index: int) -> Judgement:
    """A run without evaluation records, by the first and the last validation of its training."""
    rows = [row for row in run.rows if _number(row, "validation/accuracy") is not None]
    careful = tuple(_training_cautions(run))
    if len(rows) < 2:
        what = "Validated once" if rows else "Not evaluated"
        nothing = Finding("plain", "Accuracy and calibration before and after training are not known.")
        return Judgement(run.name, index, "plain", what, (), (nothing, *careful))
    first, last = rows[0], rows[-1]
    accuracy, auc = (_over_training(first, last, f"validation/{name}") for name in ("accuracy", "auc_mean"))
    tone, headline = _HEADLINES[accuracy.sign or 0, auc.sign]
    steps = f"step {first['step']} to {last['step']}"
    figures = (
        Figure("Validation accuracy", percent(accuracy.before), percent(accuracy.after), steps),
        Figure("Validation AUC-mean", decimal(auc.before), decimal(auc.after), "mixed questions of each step"),
        Figure("Mixed questions", _mixed(first), _mixed(last), "with right and wrong answers"),
    )
    weaker = Finding(
        "plain",
        "From validation during training alone: the two AUC-means are over different questions. Evaluation records "
        "of the model before and after training allow a paired comparison.",
    )
    warned = [_falls_while_rising("AUC-mean")] if (accuracy.sign, auc.sign) == (1, -1) else []
    return Judgement(run.name, index, tone, headline, figures, (*warned, weaker, *careful))


def against_each_other(finals: Sequence[Evaluation]) -> list[Finding]:
    """The later of every two final models against the earlier one; if they are many, all against the first."""
    found = []
    for index, first in enumerate(finals if len(finals) <= _MANY else finals[:1]):
        for second in finals[index + 1 :]:
            accuracy, paired = changes(first, second)
            if accuracy.sign is None:
                found.append(Finding("plain", f"{second.label} and {first.label} answered different questions."))
                continue
            auc = "no question is mixed under both"
            if paired.questions:
                auc = (
                    f"paired AUC {signed(paired.difference)} {interval(paired)} on {count(paired.questions)} questions "
                    "that are mixed under both"
                )
            points = f"{signed(100 * accuracy.difference, 1)} points of accuracy {interval(accuracy, 100, 1)}"
            found.append(Finding("plain", f"{second.label} against {first.label}: {points}; {auc}."))
    return found


# --- sentences --------------------------------------------------------------------------------------------------------


def _figures(before: Evaluation, after: Evaluation, accuracy: Change, paired: Change) -> tuple[Figure, ...]:
    a, b = before.summary, after.summary
    return (
        Figure(
            "Accuracy",
            percent(accuracy.before),
            percent(accuracy.after),
            f"{signed(100 * accuracy.difference, 1)} points {interval(accuracy, 100, 1)}",
        ),
        Figure(
            "Paired AUC",
            decimal(paired.before),
            decimal(paired.after),
            f"{signed(paired.difference)} {interval(paired)}, {count(paired.questions)} questions",
        ),
        Figure("AUC-mean", decimal(a["auc_mean"]), decimal(b["auc_mean"]), "mixed questions of each model"),
        Figure("Mixed questions", count(a["auc_questions"]), count(b["auc_questions"]), f"of {count(b['questions'])}"),
    )


def _what_changed(before: Evaluation, after: Evaluation, accuracy: Change, paired: Change) -> Iterator[Finding]:
    a, b = before.summary, after.summary
    verb = {1: "rose", 0: "did not change measurably", -1: "fell"}[accuracy.sign or 0]
    yield Finding(
        {1: "good", 0: "plain", -1: "bad"}[accuracy.sign or 0],  # type: ignore[arg-type]
        f"Accuracy {verb}: {percent(accuracy.before)} to {percent(accuracy.after)} on {count(accuracy.questions)} "
        "questions.",
    )
    if paired.sign is None:
        yield Finding("warn", "No question is mixed under both models, so paired AUC is undefined.")
    else:
        verb = {1: "more often", 0: "as often as before, as far as can be measured", -1: "less often"}[paired.sign]
        yield Finding(
            {1: "good", 0: "plain", -1: "bad"}[paired.sign],  # type: ignore[arg-type]
            f"On the {count(paired.questions)} questions that are mixed under both models, a right answer has the "
            f"higher confidence {verb}: {percent(paired.before)} to {percent(paired.after)} of all pairs.",
        )
    if (accuracy.sign, paired.sign) == (1, -1):
        yield _falls_while_rising("paired AUC")
    fell = b["auc_mean"] < a["auc_mean"] - _CLEAR * math.hypot(_zero(a["auc_mean_se"]), _zero(b["auc_mean_se"]))
    if fell and paired.sign is not None and paired.sign >= 0:
        yield Finding(
            "warn",
            f"AUC-mean falls ({decimal(a['auc_mean'])} to {decimal(b['auc_mean'])}) while paired AUC does not: a "
            "composition effect. The easy mistakes are gone, and the hard questions that stay mixed weigh more.",
        )
    if paired.questions and paired.questions < _FEW_MIXED:
        yield Finding("warn", f"Paired AUC rests on {paired.questions} questions only.")


def _falls_while_rising(what: str) -> Finding:
    return Finding(
        "bad",
        f"Warning: {what} falls while accuracy rises. Confidence says less about which answers are right, which is "
        "what calibration-aware training is meant to prevent.",
    )


def _cautions(found: Evaluation, run: Run) -> Iterator[Finding]:
    numbers = found.summary
    if numbers["truncated"] > _TRUNCATED:
        yield Finding("warn", f"{percent(numbers['truncated'])} of the responses were cut off at the length limit.")
    ungraded = numbers["timeout"] + numbers["unparseable"]
    if ungraded > _UNGRADED:
        yield Finding(
            "warn",
            f"{percent(ungraded)} of the responses have no verdict: grading timed out, or the reference answer cannot "
            "be read.",
        )
    score, _ = found.scored
    if len(score) < len(found.columns.score):
        without = 1 - len(score) / len(found.columns.score)
        yield Finding("warn", f"{percent(without)} of the graded responses have no log-prob and no place in any AUC.")
    if 0 < numbers["auc_questions"] < _FEW_MIXED:
        yield Finding("warn", f"AUC-mean rests on {count(numbers['auc_questions'])} mixed questions only.")
    if numbers["auc_questions"] == 0:
        yield Finding("warn", "No question has right and wrong answers: AUC-mean is undefined.")
    yield from _training_cautions(run)


def _training_cautions(run: Run) -> Iterator[Finding]:
    entropy = _values(run, "policy/entropy")
    if len(entropy) > 1 and entropy[-1] < _ENTROPY_LEFT * entropy[0]:
        yield Finding("warn", f"Entropy fell from {entropy[0]:.3g} to {entropy[-1]:.3g} nats per token.")
    gap = _values(run, "engine/gap_p99")
    if gap and max(gap) > _GAP:
        yield Finding(
            "bad", f"Engine and policy disagreed: exp |gap| reached {max(gap):.3g} at the 99th percentile of tokens."
        )
    skipped = sum(_values(run, "train/skipped"))
    if skipped:
        yield Finding("warn", f"{skipped:.0f} optimizer steps were skipped because a number was not finite.")
    idle = _values(run, "advantage/zero_groups")
    if idle and idle[-1] > _NO_GRADIENT:
        yield Finding("warn", f"{percent(idle[-1])} of the last step's groups trained nothing.")


def _over_training(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> Change:
    a, b = _number(first, name), _number(last, name)
    if a is None or b is None:
        return Change(math.nan, math.nan, math.nan, math.nan, 0)
    half = _CLEAR * math.hypot(_number(first, f"{name}_se") or 0.0, _number(last, f"{name}_se") or 0.0)
    return Change(a, b, b - a - half, b - a + half, int(_number(last, "validation/questions") or 1))


def _mixed(row: Mapping[str, Any]) -> str:
    found = _number(row, "validation/auc_questions")
    return "?" if found is None else count(found)


def _values(run: Run, name: str) -> list[float]:
    return [value for row in run.rows if (value := _number(row, name)) is not None]


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, float | int) and math.isfinite(value) else None


def _zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


# --- numbers ----------------------------------------------------------------------------------------------------------


def percent(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{100 * value:.1f} %"


def decimal(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.3f}"


def signed(value: float, digits: int = 3) -> str:
    return "undefined" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def count(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:,.0f}"


def interval(change: Change, factor: float = 1, digits: int = 3) -> str:
    """The 95 % interval of a difference, or nothing if there is none."""
    if not (math.isfinite(change.low) and math.isfinite(change.high)):
        return "(no interval)"
    return f"({signed(factor * change.low, digits)} to {signed(factor * change.high, digits)})"
