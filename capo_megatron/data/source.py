"""The order in which problems are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capo_megatron.data.problems import digest
from capo_megatron.errors import DataError
from capo_megatron.types import Problem


class ShuffledSource:
    """Problems in a seeded order, pass after pass; a `PromptSource`.

    Each pass goes through every problem once, in an order that depends on (seed, pass) alone: no random state is kept,
    so ranks agree without talking and a state restores exactly, whatever the library versions. A `take` that reaches
    over the end of a pass may hold a problem twice. Raises DataError if there are no problems or ids occur twice.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, shuffle: bool = True) -> None:
        if not problems:
            raise DataError("data.train: no problems to train on.")
        self._problems = tuple(problems)
        self._index = {problem.id: index for index, problem in enumerate(problems)}
        if len(self._index) < len(problems):
            raise DataError(f"data: {len(problems)} problems have only {len(self._index)} ids. Make the ids unique.")
        self._seed = seed
        self._shuffle = shuffle
        self._pass = 0
        self._position = 0
        self._order = self._permutation()
        self._repeats: list[int] = []  # indices to give before anything new

    def __len__(self) -> int:
        return len(self._problems)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems, repeats first; starts a new pass, in a new order, whenever one ends."""
        taken, self._repeats = self._repeats[:count], self._repeats[count:]
        while len(taken) < count:
            if self._position == len(self._problems):
                self._pass, self._position = self._pass + 1, 0
                self._order = self._permutation()
            stop = min(self._position + count - len(taken), len(self._problems))
            taken += self._order[self._position : stop]
            self._position = stop
        return [self._problems[index] for index in taken]

    def repeat(self, problems: Sequence[Problem]) -> None:
        """Give these (in this order, repeats allowed) before anything new, after what is still to be repeated."""
        strangers = [problem.id for problem in problems if problem.id not in self._index]
        if strangers:
            raise DataError(f"data: cannot repeat problem {strangers[0]!r}, which is not one of the training problems.")
        self._repeats += [self._index[problem.id] for problem in problems]

    def find(self, ids: Sequence[str]) -> list[Problem]:
        """The problems of these ids, in this order. Raises DataError for an id that no training problem has."""
        strangers = [name for name in ids if name not in self._index]
        if strangers:
            raise DataError(f"data: problem {strangers[0]!r} is not one of the training problems.")
        return [self._problems[self._index[name]] for name in ids]

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, as JSON values, with what identifies the problems it is an order of."""
        return {"pass": self._pass, "position": self._position, "repeats": list(self._repeats), **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken. Raises DataError if the problems or their order are others now."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise DataError(
                    f"data: cannot resume, the {name} of the training problems was {state[name]} when the checkpoint "
                    f"was written and is {value} now. Restore the data options, or start in a new output folder."
                )
        self._pass, self._position = int(state["pass"]), int(state["position"])
        self._order = self._permutation()
        self._repeats = [int(index) for index in state["repeats"]]

    def _identity(self) -> dict[str, Any]:
        return {
            "number": len(self._problems),
            "fingerprint": digest(*(problem.id for problem in self._problems)),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _permutation(self) -> list[int]:
        indices = range(len(self._problems))
        if not self._shuffle:
            return list(indices)
        return sorted(indices, key=lambda index: digest(self._seed, self._pass, index))
