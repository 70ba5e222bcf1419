"""The reward functions by kind. See `build`."""

from __future__ import annotations

import logging
import marshal
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from capo_megatron.answers import boxed_answer, collapsed
from capo_megatron.config import RewardConfig
from capo_megatron.errors import ConfigError, RewardError
from capo_megatron.rewards.pool import WorkerPool
from capo_megatron.rewards.scorers import gym_answer
from capo_megatron.seams import RewardFunction
from capo_megatron.types import Grade, Problem, Verdict

_LOG = logging.getLogger(__name__)
_CACHE_SIZE = 16_384
_WARNINGS = 3

_Outcome = tuple[str, Any] | None  # see WorkerPool.run


def build(config: RewardConfig) -> RewardFunction:
    """The reward function for `config.kind`:

    math_verify     the last box of the response against the answer, by math-verify: see `MathVerify`
    exact           the same text as the answer: see `grade_exact`
    reasoning_gym   the scorer of the problem's reasoning-gym task: see `gym_item`
    task            the project's own procedural tasks: see `grade_task`
    a:b             the user's function `b` in module `a` (or file `a`, ending in .py): see `user_item`

    Raises ConfigError and RewardError as `build_reward` says.
    """
    _check(config)
    if config.kind == "exact":
        return InProcess(grade_exact)
    if config.kind == "task":
        return InProcess(grade_task)
    pool = WorkerPool(config.kind, config.workers, config.timeout_s, config.memory_mib)
    if config.kind == "math_verify":
        return MathVerify(pool, config.max_answer_chars)
    if config.kind == "reasoning_gym":
        return InWorkers(pool, gym_item, raised=Grade(Verdict.WRONG, 0.0, extra={"score": 0.0}))
    return InWorkers(pool, user_item, raised=Grade(Verdict.UNPARSEABLE, 0.0))


def _check(config: RewardConfig) -> None:
    limits = (
        ("workers", config.workers, 1),
        ("timeout_s", config.timeout_s, 0.1),
        ("memory_mib", config.memory_mib, 128),
        ("max_answer_chars", config.max_answer_chars, 1),
    )
    for name, value, least in limits:
        if value < least:
            raise ConfigError(f"reward.{name}: {value} is too small; set it to {least} or more.")
    known = ("math_verify", "exact", "reasoning_gym", "task")
    if config.kind not in known and not re.fullmatch(r".+:\w+", config.kind):
        allowed = f"{', '.join(known)}, package.module:function or /dir/file.py:function"
        raise ConfigError(f"reward.kind: {config.kind!r} is unknown. Allowed are {allowed}.")


class InProcess:
    """Grades with a function that cannot hang, in this process."""

    def __init__(self, function: Callable[[Problem, str], Grade]) -> None:
        self._function = function

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        return [self._function(problem, response) for problem, response in zip(problems, responses, strict=True)]

    def close(self) -> None:
        return None


class InWorkers:
    """Grades in killable processes. `raised` is the grade of a response that made the scorer raise."""

    def __init__(self, pool: WorkerPool, item: Callable[[Problem, str], object], raised: Grade) -> None:
        self._pool = pool
        self._item = item
        self._raised = raised
        self._warnings = _WARNINGS

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        """One grade per pair. Raises RewardError if the scorer's contract is broken, not for anything in a response."""
        items = [
            _marshalled(problem, self._item(problem, text)) for problem, text in zip(problems, responses, strict=True)
        ]
        outcomes = self._pool.run(items)
        for problem, outcome in zip(problems, outcomes, strict=True):
            if outcome is not None and outcome[0] == "raised" and self._warnings > 0:
                self._warnings -= 1
                _LOG.warning(
                    "problem %s: %s: the scorer raised: %s", problem.id, self._raised.verdict.value, outcome[1]
                )
        return [_graded(outcome, self._raised) for outcome in outcomes]

    def close(self) -> None:
        self._pool.close()


class MathVerify:
    """Grades the last box of a response against the reference answer, by the policy of `rewards.maths`.

    A response without a box is wrong, and so is a boxed answer longer than `max_answer_chars`, which is not parsed. The
    reference may be boxed or not. A pair of reference and answer is graded once and remembered, unless it timed out:
    that may have been the machine's load.
    """

    def __init__(self, pool: WorkerPool, max_answer_chars: int) -> None:
        self._pool = pool
        self._max_answer_chars = max_answer_chars
        self._known: OrderedDict[tuple[str, str | None], Verdict] = OrderedDict()

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        """One grade per pair; `extracted` is the content of the box, cut off at `max_answer_chars`."""
        answers = [boxed_answer(response) for response in responses]
        pairs = [(problem.answer, self._short(answer)) for problem, answer in zip(problems, answers, strict=True)]
        verdicts = self._verdicts(list(dict.fromkeys(pairs)))
        return [
            Grade(verdicts[pair], float(verdicts[pair] is Verdict.CORRECT), answer and answer[: self._max_answer_chars])
            for pair, answer in zip(pairs, answers, strict=True)
        ]

    def close(self) -> None:
        self._pool.close()

    def _short(self, answer: str | None) -> str | None:
        return answer if answer is not None and len(answer) <= self._max_answer_chars else None

    def _verdicts(self, pairs: list[tuple[str, str | None]]) -> dict[tuple[str, str | None], Verdict]:
        verdicts = {pair: self._known[pair] for pair in pairs if pair in self._known}
        new = [pair for pair in pairs if pair not in verdicts]
        for pair, outcome in zip(new, self._pool.run([marshal.dumps(pair) for pair in new]), strict=True):
            verdicts[pair] = _graded(outcome, raised=Grade(Verdict.WRONG, 0.0)).verdict
        for pair, verdict in verdicts.items():
            if verdict is not Verdict.TIMEOUT:
                self._known[pair] = verdict
                self._known.move_to_end(pair)
        while len(self._known) > _CACHE_SIZE:
            self._known.popitem(last=False)
        return verdicts


def _graded(outcome: _Outcome, raised: Grade) -> Grade:
    if outcome is None:
        return Grade(Verdict.TIMEOUT, 0.0)
    status, value = outcome
    if status == "raised":
        return raised
    verdict, reward, extracted, extra = value
    return Grade(Verdict(verdict), reward, extracted, extra)


def _marshalled(problem: Problem, item: object) -> bytes:
    try:
        return marshal.dumps(item)  # type: ignore[arg-type]
    except ValueError as error:
        allowed = "None, bools, numbers, strings, lists, tuples and dicts"
        raise RewardError(
            f"problem {problem.id}: extra: a value cannot be sent to a grading process; allowed are {allowed}."
        ) from error


def gym_item(problem: Problem, response: str) -> object:
    """What the reasoning-gym scorer needs: extra["rg_task"], extra["rg_entry"] and, if there, extra["rg_config"]: the
    options of the data set, which some scorers depend on.

    The answer is the last <answer>...</answer> of the response, else its last box, else all of it. It is correct if it
    scores 0.99 or more; the score is in `Grade.extra["score"]`. An answer that makes the scorer raise is wrong.
    """
    missing = [name for name in ("rg_task", "rg_entry") if name not in problem.extra]
    if missing:
        raise RewardError(
            f"problem {problem.id}: extra: {missing[0]!r} is missing; reward.kind=reasoning_gym needs it."
        )
    return problem.extra["rg_task"], problem.extra.get("rg_config", {}), problem.extra["rg_entry"], gym_answer(response)


def user_item(problem: Problem, response: str) -> object:
    """What a user's `function(problem, response)` gets: an object with the fields of Problem, and the text.

    It returns a bool, a finite number (the reward; correct above 0.5), a Grade, or None for "cannot be graded"; else
    RewardError is raised. A response on which it raises, hangs or exhausts the memory is not graded, nor trained on.
    """
    fields = (
        problem.id,
        problem.prompt,
        tuple(problem.prompt_ids),
        problem.answer,
        problem.source,
        dict(problem.extra),
    )
    return fields, response


def grade_exact(problem: Problem, response: str) -> Grade:
    """Correct if the response, its last line or its last box has the text of the answer, white space collapsed.

    A response with a box is judged by the box alone. An empty reference answer is unparseable.
    """
    expected = collapsed(problem.answer)
    boxed = boxed_answer(response)
    lines = response.strip().splitlines() or [""]
    read = [collapsed(text) for text in ([response, lines[-1]] if boxed is None else [boxed])]
    if not expected:
        return Grade(Verdict.UNPARSEABLE, 0.0, read[-1])
    return _binary(expected in read, expected if expected in read else read[-1])


def grade_task(problem: Problem, response: str) -> Grade:
    """The reward of the project's own tasks, for a response without its end-of-sequence token.

    chain (extra["digits"] = k): correct if the response is exactly k digits of which the last is the answer. That the
    response had ended is for the caller to know. one_digit: correct if the first integer in the response is the answer.
    """
    if "digits" in problem.extra:
        whole = re.fullmatch(rf"[0-9]{{{int(problem.extra['digits'])}}}", response)
        return _binary(whole is not None and response[-1:] == problem.answer, response[-1:] if whole else None)
    expected, found = _integer(problem.answer), _integer(response)
    if expected is None:
        return Grade(Verdict.UNPARSEABLE, 0.0, found)
    return _binary(found == expected, found)


def _integer(text: str) -> str | None:
    """The first integer in `text`, as a string without leading zeros: int() refuses more than 4,300 digits."""
    match = re.search(r"(-?)0*([0-9]+)", text)
    return match and ("" if match[2] == "0" else match[1]) + match[2]


def _binary(correct: bool, extracted: str | None) -> Grade:
    return Grade(Verdict.CORRECT if correct else Verdict.WRONG, float(correct), extracted)
