"""What a grading process can do. A scorer takes one item and returns its reply, both values that `marshal` can write.

A reply is (verdict, reward, extracted, extra), with the verdicts of `types.Verdict` as strings. Nothing here imports
torch, nor `types`, which does; a user's function that returns a Grade has imported it itself.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import re
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capo_megatron.answers import boxed_answer
from capo_megatron.errors import RewardError

Reply = tuple[str, float, str | None, dict[str, float]]
Scorer = Callable[[Any], Reply]

PASSING_SCORE = 0.99  # reasoning-gym gives partial credit, some tasks 0.01 for any answer


@dataclass(frozen=True)
class ProblemView:
    """A problem as a user's reward function sees it: the fields of `types.Problem`, without importing torch."""

    id: str
    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    source: str
    extra: Mapping[str, Any]


def load(kind: str) -> Scorer:
    """The scorer for a `reward.kind`. Raises RewardError, or whatever the import of a user's module raises."""
    if kind == "math_verify":
        return _math_scorer()
    if kind == "reasoning_gym":
        return _gym_scorer()
    return user_scorer(kind)


def _math_scorer() -> Scorer:
    import logging

    from capo_megatron.rewards import maths

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off; the pool has its own
    maths.verdict("1", "\\frac{1}{2}")  # the parser builds its tables now, not within the time of the first answer
    limit = (_peak_bytes() + resource.getrlimit(resource.RLIMIT_AS)[0]) / 2

    def score(item: tuple[str, str | None]) -> Reply:
        verdict = maths.verdict(*item)
        # math-verify and sympy turn a MemoryError into "not equal". An evaluation that came to use half of the memory
        # is taken to have met one: the integers in question grow by doubling.
        if verdict != maths.CORRECT and _peak_bytes() > limit:
            raise MemoryError
        return verdict, float(verdict == maths.CORRECT), item[1], {}

    return score


def _peak_bytes() -> int:
    """The largest address space this process ever had."""
    match = re.search(r"VmPeak:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def _gym_scorer() -> Scorer:
    """A scorer of items (task, options of the data set, entry, answer): correct from 0.99 by the task's own score.

    The score is in extra["score"]; partial credit is not rewarded. Unknown tasks and broken entries raise RewardError.
    """
    import reasoning_gym

    functions: dict[tuple[str, str], Callable[[str, dict[str, Any]], float]] = {}

    def score(item: tuple[str, dict[str, Any], dict[str, Any], str]) -> Reply:
        task, options, entry, answer = item
        missing = sorted({"question", "answer", "metadata"} - set(entry))
        if missing:
            raise RewardError(f"reasoning_gym/{task}: entry: {missing[0]!r} is missing, got {sorted(entry)}.")
        key = (task, repr(sorted(options.items())))
        if key not in functions:
            try:
                functions[key] = reasoning_gym.create_dataset(task, **options).score_answer
            except (AssertionError, TypeError, ValueError) as error:
                raise RewardError(f"reasoning_gym/{task}: cannot be set up with options {options}: {error}.") from error
        points = float(functions[key](answer, entry))
        correct = points >= PASSING_SCORE
        return "correct" if correct else "wrong", float(correct), answer, {"score": points}

    return score


def gym_answer(response: str) -> str:
    """The answer in a response: the last <answer>...</answer>, else the last box, else the whole response, stripped."""
    tagged = response.rpartition("</answer>")[0]
    if "<answer>" in tagged:
        return tagged.rpartition("<answer>")[2].strip()
    boxed = boxed_answer(response)
    return response.strip() if boxed is None else boxed


def user_scorer(path: str) -> Scorer:
    """A scorer around `package.module:function` or `/dir/file.py:function`, whose contract is checked at every call."""
    function = _imported(path)

    def score(item: tuple[tuple[Any, ...], str]) -> Reply:
        fields, response = item
        return _reply(path, function(ProblemView(*fields), response))

    return score


def _imported(path: str) -> Callable[..., Any]:
    source, _, name = path.rpartition(":")
    module = _module_from_file(path, Path(source)) if source.endswith(".py") else _module(path, source)
    function = vars(module).get(name)
    if not callable(function):
        near = difflib.get_close_matches(name, [known for known, value in vars(module).items() if callable(value)], n=1)
        advice = f"Did you mean {near[0]}?" if near else f"Define {name}(problem, response) there."
        raise RewardError(f"reward.kind={path}: {source} has no function {name!r}. {advice}")
    if not inspect.isclass(function) and not _takes_two(function):
        raise RewardError(
            f"reward.kind={path}: the function must be callable as {name}(problem, response). "
            "Name another, or write one in Python that calls it."
        )
    return function


def _module(path: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # its own import fails: that is for it to say
            raise
        raise RewardError(
            f"reward.kind={path}: there is no module {error.name!r}. Install it, put its folder into PYTHONPATH, or "
            "give a file: /dir/file.py:function."
        ) from error


def _module_from_file(path: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise RewardError(f"reward.kind={path}: there is no Python file {file}. Give its path from here on.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickles of the module look it up there
    spec.loader.exec_module(module)
    return module


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):  # ValueError: a function in C that does not tell its arguments
        return False
    return True


def _reply(path: str, result: Any) -> Reply:
    """The reply for a user function's result: None, a bool, a number (correct above 0.5) or a Grade."""
    if result is None:
        return "unparseable", 0.0, None, {}
    types = sys.modules.get("capo_megatron.types")
    if types is not None and isinstance(result, types.Grade):
        return result.verdict.value, float(result.reward), result.extracted, dict(result.extra)
    if isinstance(result, (bool, int, float)) and math.isfinite(result):
        return "correct" if result > 0.5 else "wrong", float(result), None, {}
    allowed = "a bool, a finite number, a Grade, or None for an answer that cannot be graded"
    raise RewardError(f"reward.kind={path}: returned {result!r:.80}, a {type(result).__name__}; allowed is {allowed}.")
