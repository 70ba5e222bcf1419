"""Every dotted option of a run with its type, and how a mistake in one is worded."""

from __future__ import annotations

import difflib
import math
import reprlib
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types

from capo_megatron.algorithms import CapoConfig, available
from capo_megatron.config.sections import RunConfig

DEFAULT_ALGORITHM = CapoConfig.kind

_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
_LISTED = 20  # options of a section, at most, that are listed where one is not known
_BOUNDS = {
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Ge: ("ge", ">="),
    annotated_types.Lt: ("lt", "<"),
    annotated_types.Le: ("le", "<="),
}


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, through Annotated; a type that is no union is its own only alternative."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0]) if _is_union(get_args(annotation)[0]) else (annotation,)
    return get_args(annotation) if _is_union(annotation) else (annotation,)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


# --- the options that there are -------------------------------------------------------------------------------------


@cache
def algorithms() -> dict[str, type]:
    """The config class of every algorithm, built in or installed, by its kind."""
    return {kind: section for kind, (section, _) in available().items()}


@cache
def algorithm_defaults(kind: str) -> dict[str, Any]:
    """The default of every option of an algorithm, by its name; MISSING for one that must be given."""
    return {
        spec.name: spec.default if spec.default_factory is MISSING else spec.default_factory()
        for spec in fields(algorithms()[kind])
    }


@cache
def known(kind: str) -> dict[str, Any]:
    """Every section and option by its dotted path, with its type, for a run with this algorithm."""
    return dict(_walk(RunConfig, "", kind))


def _walk(section: type, prefix: str, kind: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(section, include_extras=True)
    for spec in fields(section):
        path = f"{prefix}{spec.name}"
        annotation = algorithms()[kind] if path == "algorithm" else hints[spec.name]
        yield path, annotation
        for member in _members(annotation):
            if is_dataclass(member):
                yield from _walk(member, f"{path}.", kind)  # type: ignore[arg-type]


def is_section(path: Sequence[str]) -> bool:
    """True if the path names a section, as opposed to an option or nothing."""
    annotation = known(DEFAULT_ALGORITHM).get(".".join(path))
    return any(is_dataclass(member) for member in _members(annotation))


# --- values that no option can hold ---------------------------------------------------------------------------------

_INTEGERS = 2**63  # where the integers of tensors and of checkpoints end
_FLOATS = 3.4e38  # where those of float32 end


def oversized(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, one line) for each number in the tree that neither tensors nor files could hold."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from oversized(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from oversized(item, f"{path}[{index}]")
    elif isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
        yield path, f"{path}: got {show(value)}, expected an integer from -2**63 to below 2**63."
    elif isinstance(value, float) and math.isfinite(value) and abs(value) > _FLOATS:
        yield path, f"{path}: got {show(value)}, expected a number from -{_FLOATS:g} to {_FLOATS:g}, as float32 holds."


# --- wording --------------------------------------------------------------------------------------------------------


def show(value: Any) -> str:
    """A value as it would be written in YAML, shortened."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else reprlib.repr(value)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """' Did you mean X?' or nothing. The same letters in another order are nearer than anything else."""
    known = list(choices)
    swapped = [choice for choice in known if sorted(choice) == sorted(word)]
    close = swapped or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def explain(errors: Sequence[Mapping[str, Any]], kind: str) -> list[tuple[str, str]]:
    """(dotted path, one line) for each option that is wrong, in the order of the errors."""
    lines: dict[str, str] = {}
    for error in errors:
        option, path = _locate(error["loc"], kind)
        lines.setdefault(path, _line(error, option, path, kind))
    return list(lines.items())


def _locate(loc: Sequence[str | int], kind: str) -> tuple[str, str]:
    """(the longest known option, the whole dotted path) of a pydantic location, without its union branches."""
    tagged = len(loc) > 1 and loc[0] == "algorithm" and loc[1] in algorithms()
    parts = [loc[0], *loc[2:]] if tagged else list(loc)
    options = known(kind)
    depth = max(d for d in range(len(parts) + 1) if d == 0 or ".".join(map(str, parts[:d])) in options)
    option = ".".join(map(str, parts[:depth]))
    rest = list(parts[depth:])
    path = option
    if rest and isinstance(rest[0], str) and (not option or _has_keys(options[option])):
        path = f"{option}.{rest.pop(0)}".lstrip(".")
    return option, path + "".join(f"[{part}]" for part in rest if isinstance(part, int))


def _has_keys(annotation: Any) -> bool:
    return any(is_dataclass(member) or get_origin(member) is dict for member in _members(annotation))


def _line(error: Mapping[str, Any], option: str, path: str, kind: str) -> str:
    if error["type"] == "unexpected_keyword_argument":
        return f"{path}: no such option.{_near_miss(path, kind)}"
    if error["type"] == "missing":
        return f"{path}: missing, and it has no default; expected {describe(known(kind)[option])}."
    if error["type"] == "value_error":
        return f"{path}: {error['ctx']['error']}"
    if option not in known(kind):
        return f"{path or 'config'}: {error['msg']}."
    expected = _expected(known(kind)[option], option, path)
    if error["type"] == "finite_number":
        expected = expected.replace("a number", "a finite number")
    return f"{path}: got {show(error['input'])}, expected {expected}."


def _near_miss(path: str, kind: str) -> str:
    """A near miss among the siblings, else that name in another algorithm or section, else all siblings, if few."""
    section, _, word = path.rpartition(".")
    options = known(kind)
    siblings = [name for name in options if name.rpartition(".")[0] == section]
    guess = did_you_mean(path, siblings)
    if guess and difflib.get_close_matches(word, [name.rpartition(".")[2] for name in siblings], n=1, cutoff=0.6):
        return guess
    owners = [name for name in algorithms() if section == "algorithm" and path in known(name)]
    if owners:
        return f" It is an option of {', '.join(owners)}, and algorithm.kind is {kind}."
    if word in options and is_section([word]):
        return f" {word} is a section of its own."
    elsewhere = [name for name in options if name.rpartition(".")[2] == word]
    if elsewhere:
        return f" Did you mean {' or '.join(elsewhere)}?"
    return f" Known: {', '.join(siblings)}." if 0 < len(siblings) <= _LISTED else ""


def _expected(annotation: Any, option: str, path: str) -> str:
    """What a value at `path`, which may lie inside the option's list or mapping, has to be."""
    if path == option:
        return describe(annotation)
    inner = [get_args(member)[-1] for member in _members(annotation) if get_origin(member) is dict]
    inner += [get_args(member)[0] for member in _members(annotation) if get_origin(member) in (list, tuple)]
    return describe(inner[0]) if inner else describe(annotation)


def describe(annotation: Any) -> str:
    """The values that a type allows, in words: `an integer > 0`, `'float32' or 'bfloat16'`, `text or null`."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return " ".join([describe(arguments[0]), *_describe_bounds(arguments[1:])])
    if origin is Literal:
        return " or ".join(show(argument) for argument in arguments)
    if _is_union(annotation):
        return " or ".join(dict.fromkeys(describe(argument) for argument in arguments))
    if origin is dict:
        return "a mapping {key: value}"
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"a list [...] of {_plural(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)} values, each {describe(arguments[0])}"
    return "a section of options" if is_dataclass(annotation) else _WORDS[annotation]


def _plural(annotation: Any) -> str:
    word = describe(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation)
    return {"an integer": "integers", "a number": "numbers", "text": "texts"}.get(word, word)


def _describe_bounds(bounds: Collection[Any]) -> Iterator[str]:
    ours = [(bound, *_BOUNDS[type(bound)]) for bound in bounds if type(bound) in _BOUNDS]
    words = [f"{sign} {_exact(getattr(bound, name))}" for bound, name, sign in ours]
    if words:
        yield " and ".join(words)
    if any(isinstance(bound, annotated_types.MinLen) for bound in bounds):
        yield "that is not empty"


def _exact(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
