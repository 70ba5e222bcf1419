"""Failures of one rank that all ranks learn of, so that none waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from capo_megatron.errors import CapoError
from capo_megatron.seams import Team

_Outcome = TypeVar("_Outcome")
_Failure = tuple[type[CapoError], str] | None


def gather_or_raise(team: Team, work: Callable[[], _Outcome]) -> list[_Outcome]:
    """What `work` returned on every rank, in rank order. Collective.

    A CapoError on one rank is raised on all of them, with the rank named unless all of them failed alike.
    """
    if team.size == 1:
        return [work()]
    outcome, failure = _attempt(work)
    answers = team.gather((outcome, failure))
    failures = [(rank, *found) for rank, (_, found) in enumerate(answers) if found is not None]
    if failures:
        rank, kind, text = failures[0]
        if len({text for _, _, text in failures}) == 1 and len(failures) == team.size:
            raise kind(text)
        others = f" ({len(failures) - 1} more ranks failed)" if len(failures) > 1 else ""
        raise kind(f"rank {rank}: {text}{others}")
    return [answer for answer, _ in answers]


def on_first_rank(team: Team, action: Callable[[], object]) -> None:
    """Let rank 0 alone act, e.g. on files. Every rank waits for it, and a CapoError is raised on all. Collective."""
    _, failure = _attempt(action) if team.rank == 0 else (None, None)
    failure = team.gather(failure)[0]
    if failure is not None:
        kind, text = failure
        raise kind(text)


def _attempt(work: Callable[[], _Outcome]) -> tuple[_Outcome | None, _Failure]:
    try:
        return work(), None
    except CapoError as error:
        return None, (type(error), str(error))
