"""When two mathematical answers count as the same: math-verify 0.9.0 with its known false positives vetoed.

math-verify decides; this module chooses what it gets to see, and overrules it where it says "equal" too easily. No
computer algebra of our own here. The policy, with reference | answer:

    accepted    an unevaluated expression of the right value              12 | 2^2\\cdot 3
                a percent sign dropped or worked out                      10\\% | 10 or 0.1
                a degree sign dropped                                     90^\\circ | 90
                a unit after a number                                     5 | 5\\text{ cm}
                an ordered pair without its brackets                      (1,2) | 1,2
                a relation for its solution set, and back                 x<3 | (-\\infty,3)
                a base mark that the reference leaves out                 101 | 101_2
                a variable in the other case                          x | X
                a choice with its text                                    B | \\textbf{(B)}\\ 12
                decimals that agree in six places and three digits        0.333333 | 1/3
    rejected    numbers that differ only in size below 1e-6               \\frac{1}{2^{99}} | \\frac{1}{2^{98}}
                an ellipsis, except when the two look the same            1, 2, \\ldots, n | 1, 3, \\ldots, 2n-1
                another base, or a base mark left out                     101_2 | 101
                a set for an ordered pair or interval, and back           \\{1,2\\} | (1,2)
                equations without solutions, unless proportional          x^2+1=0 | x^2+2=0
                several answers where one is asked for                    7 | 5,7
                brackets nested deeper than 30: their parsing takes seconds
    not seen    equalities that math-verify misses: assumptions (\\sqrt{1/n} | 1/\\sqrt{n}), degrees in radians,
    as equal    \\sqrt{-1} for i, "x<-1 or x>1" for a union of intervals

Runs inside a grading process: nothing here limits time, and MemoryError may escape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from capo_megatron.answers import boxed_answer, same_text, unboxed

CORRECT, WRONG, UNPARSEABLE = "correct", "wrong", "unparseable"

_MAX_DEPTH = 30
_ELLIPSIS = re.compile(r"\\[lcd]?dots|…|\.\.\.")
_BASED = re.compile(r"\(?([0-9A-Z]+)\)?_\{?(\d+)\}?")
_CHOICE = re.compile(r"\(([A-J])\)|([A-J])(?=$|[.:)])")
_STYLED = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}")
_UNIT_WORD = re.compile(r"(?<=[\d}\s])\s*(?:[A-Za-z]{3,}|cm|mm|km|kg|ft|in|lb|hr|oz)\.?$")
_REWRITES = (
    (re.compile(r"\\mathrm\s*\{([ei])\}|\\mathrm ([ei])\b"), r"\1\2"),  # math-verify cannot read the upright e and i
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),  # it would drop this root: 4\sqrt(2) = 4
    (re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)$"), r"\1 \\times 10^{\2}"),  # and take this e for 2.718...
    (re.compile(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3})"), ""),  # thousands
    (re.compile(r"(?<=\d)\.(?!\d)"), ""),  # "3." is 3
    (re.compile(r"^\\approx|(?<=\S)[.,;]$"), ""),
)
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # how the parser writes a percent sign


@dataclass(frozen=True)
class _Reference:
    text: str
    parsed: list[Any]  # empty: can be compared as text only
    units: bool  # a unit at the end of an answer may be dropped, since it cannot be one of the reference's variables


def verdict(reference: str, answer: str | None) -> str:
    """Whether `answer` (the content of the box; None if there was none) equals the reference answer.

    Returns "unparseable" if the reference cannot be read, whatever the answer; else "correct" or "wrong".
    """
    gold = _read_reference(reference)
    if gold is None:
        return UNPARSEABLE
    if not answer or _depth(answer) > _MAX_DEPTH:
        return WRONG
    return CORRECT if same_text(gold.text, answer) or _equal(gold, _rewritten(answer)) else WRONG


@lru_cache(maxsize=4096)
def _read_reference(reference: str) -> _Reference | None:
    boxed = boxed_answer(reference)
    text = _rewritten(reference if boxed is None else boxed)
    if _ELLIPSIS.search(text) or _based(text):
        return _Reference(text, [], units=False)
    units = not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", _UNIT_WORD.sub("", _STYLED.sub("", text).strip())))
    parsed = _parsed(text, units)
    if not parsed:
        return None
    if parsed[0] in (sympy.zoo, sympy.nan):  # a time of day such as 12:00, read as a division by zero
        parsed = []
    return _Reference(text, parsed, units)


def _rewritten(text: str) -> str:
    text = unboxed(text)
    if _ELLIPSIS.search(text):
        return text
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    return text.strip()


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=2)
def _extraction(units: bool) -> list[LatexExtractionConfig]:
    rules = NormalizationConfig(units=units, malformed_operators=True, nits=True)
    return [LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)]


def _parsed(text: str, units: bool) -> list[Any]:
    """The expression that math-verify reads in `text`, in a list; empty if it reads none."""
    # Without its own timeouts: those are signals, which do not interrupt long integer arithmetic.
    return parse(f"\\boxed{{{text}}}", _extraction(units), fallback_mode="no_fallback", parsing_timeout=None)


def _equal(gold: _Reference, answer: str) -> bool:
    choice = _choice(gold.text)
    if choice is not None and _choice(answer) is not None:
        return choice == _choice(answer)
    based = _based(answer)
    if not gold.parsed or _ELLIPSIS.search(answer):
        return based is not None and based == _based(gold.text)
    parsed = _parsed(based[0] if based else answer, gold.units)
    if not parsed or {_brackets(gold.text), _brackets(answer)} == {"set", "pair"}:
        return False
    return (
        _same_size(gold.parsed[0], parsed[0])  # first, since it spares math-verify the simplification of two numbers
        and verify(gold.parsed, parsed, allow_set_relation_comp=True, timeout_seconds=None)
        and _same_solutions(gold.parsed[0], parsed[0])
    )


def _choice(text: str) -> str | None:
    """The letter of a multiple-choice answer, A to J."""
    match = _CHOICE.match(re.sub(r"\\ |[\s~$]", "", _STYLED.sub(r"\1", text)))
    return match and (match[1] or match[2])


def _based(text: str) -> tuple[str, str] | None:
    """Digits and base of a number like 101_2."""
    match = _BASED.fullmatch(re.sub(r"\s", "", text))
    return match and (match[1], match[2])


def _brackets(text: str) -> str | None:
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\s", "", text)
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set"
    return "pair" if re.fullmatch(r"\([^()]*,[^()]*\)", text) else None


def _same_size(gold: Any, answer: Any) -> bool:
    """False for two numbers that math-verify calls equal only because both are small.

    It compares differences with an absolute threshold. Here they must agree relatively too: to 1e-3 if one of them is a
    decimal fraction (which is rounded), else to 1e-12.
    """
    pairs = list(product(_values(gold), _values(answer)))
    return not pairs or any(_close(one, other) for one, other in pairs)


def _values(expression: Any) -> list[Any]:
    """The numbers that an expression may stand for: none if it is no number, two if it has a percent sign."""
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return []
    if expression.has(_PERCENT):
        return [expression.xreplace({_PERCENT: sympy.Rational(1, 100)}), expression.xreplace({_PERCENT: sympy.S.One})]
    return [expression]


def _close(one: Any, other: Any) -> bool:
    rounded = one.has(sympy.Float) or other.has(sympy.Float)
    one, other = one.evalf(30), other.evalf(30)
    if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
        return True
    if one == 0 or other == 0:
        return bool(abs(one - other) < 1e-12)
    return bool(abs(one - other) <= (1e-3 if rounded else 1e-12) * max(abs(one), abs(other)))


def _same_solutions(gold: Any, answer: Any) -> bool:
    """False for two equations that math-verify calls equal only because it finds no solution of either."""
    if not (isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)):
        return True
    if sympy.solve(gold, *gold.free_symbols, dict=True):
        return True
    ratio = sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)
