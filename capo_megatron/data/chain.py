"""The chain task: left-to-right arithmetic mod 10, in which a tiny model shows what calibration-aware training does.

**Question.** k operations (k uniform in `min_ops`..`max_ops`), each +, - or * with equal chance, on uniform digits,
applied strictly from left to right, every result mod 10. **Response**: the k running results, one digit each, then `$`:

    3+8*7=  ->  17$        3 + 8 = 1, then 1 * 7 = 7 (mod 10)

A response is right if it is exactly k digits and `$`, and the last digit equals the key. `$` is the tokenizer's
end-of-sequence token, so text decoded without special tokens is just the digits.

A *fact* is one (x, operation, y): there are 300. The base model learns from an **imperfect teacher**, who errs in
three ways:

* **Slips** (`slip`): a step is written as a uniformly random digit (the right one included) with this probability, and
  the chain goes on from it. Errors of low confidence.
* **Shaky facts** (`shaky`): this share of the 300 facts has one fixed wrong digit each (uniform over the nine others),
  which the teacher writes with a probability u of the fact's own, u ~ U(0.3, 0.9). The chain goes on from it. A slip at
  the same step wins. Errors of high confidence that can be unlearned. Drawn from `fact_seed`, not from the run's seed.
* **Underspecified questions** (`ambiguous`): in this share of the questions one operator (at a uniform position) is
  shown as `?`, which means + or - with equal chance. The teacher and the answer key draw the meaning independently,
  so nobody can know the answer: irreducible uncertainty. Such a question keeps its one key for good.

Keys have no slips and no shaky facts. With `wrong_key_share` > 0 (0.03 is the setting in which the noise mask
matters) that share of the facts has a fixed wrong digit in the *training keys*: the key's chain goes on from the
wrong digit, and the problem is marked `extra["wrong_key"]` where the last digit then differs. Validation and
evaluation keys are always clean. The wrong facts come from `fact_seed` too, and independently of the shaky ones.

Problems of a split are distinct, which makes the shortest chains a little rarer in large sets: 462 instead of 512 of
2,048 evaluation problems have k = 2. Demonstrations are drawn from all questions, validation and evaluation ones
included (with k = 2 there are only 15,000 questions in all): the warm-up makes the base model, and the splits are
about what reinforcement learning sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from capo_megatron.data.splits import Demonstration, Draft, Split, collect, split_seed
from capo_megatron.data.tokenizer import character_tokenizer
from capo_megatron.types import Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_OPERATORS = b"+-*?"
_BLOCK = 512  # questions drawn together: fixed, so that more problems extend fewer problems


def chain_tokenizer() -> PreTrainedTokenizerBase:
    """The 17 symbols of the task, one token each: padding `_` is 0, end-of-sequence `$` 1, then `0123456789+-*?=`."""
    return character_tokenizer("0123456789+-*?=", eos="$", pad="_")


@dataclass(frozen=True, kw_only=True)
class ChainOptions:
    """The `data.task_options` of the chain task. The defaults are the recommended laptop setting."""

    slip: float = 0.06
    shaky: float = 0.05
    ambiguous: float = 0.4
    min_ops: int = 2
    max_ops: int = 5
    fact_seed: int = 7
    wrong_key_share: float = 0.0

    def __post_init__(self) -> None:
        shares = {
            "slip": self.slip,
            "shaky": self.shaky,
            "ambiguous": self.ambiguous,
            "wrong_key_share": self.wrong_key_share,
        }
        for name, value in shares.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}: got {value}, expected a share from 0 to 1.")
        if not 1 <= self.min_ops <= self.max_ops:
            raise ValueError(
                f"min_ops: got {self.min_ops} with max_ops={self.max_ops}, expected 1 <= min_ops <= max_ops."
            )
        if self.fact_seed < 0:
            raise ValueError(f"fact_seed: got {self.fact_seed}, expected 0 or more.")


@dataclass(frozen=True)
class _Facts:
    """What is wrong with some of the 300 facts; arrays are [3, 10, 10], indexed by operation, x, y."""

    right: Ints
    wrong: Ints  # the fixed wrong digit, on every fact
    shaky: Floats  # the probability that the teacher writes the wrong digit; 0.0 on facts that are not shaky
    keys: Ints  # the facts that training keys are computed with


@dataclass(frozen=True)
class _Questions:
    """`n` questions with room for `m` = max_ops operations; operations past `ops` mean nothing."""

    ops: Ints  # [n] number of operations, k
    digits: Ints  # [n, m + 1]
    shown: Ints  # [n, m] index into "+-*?"
    hole: Ints  # [n] position of the `?`, -1 where there is none


class ChainTask:
    """Chains of arithmetic mod 10. `Problem.extra`: digits (k), ambiguous, wrong_key. `Problem.answer`: the digit."""

    name = "chain"
    reward = "task"
    stop: tuple[str, ...] = ()

    def __init__(self, options: ChainOptions, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._seed = seed
        self._facts = _draw_facts(options)

    def train_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.TRAIN, count)

    def validation_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.VALIDATION, count)

    def evaluation_problems(self, count: int) -> list[Problem]:
        return self._collect(Split.EVALUATION, count)

    def template(self, question: str) -> str:
        return question

    def question(self, problem: Problem) -> str:
        return problem.prompt

    def demonstrations(self, count: int, step: int) -> list[Demonstration]:
        """`count` questions with the imperfect teacher's responses; depends on the seed of the run and `step` alone."""
        rng = np.random.default_rng([self._seed, step])
        questions = _draw_questions(rng, count, self._options)
        results = self._teach(rng, questions)
        written = _lines(results + ord("0"), questions.ops, b"$")
        return [Demonstration(prompt, response) for prompt, response in zip(_prompts(questions), written, strict=True)]

    def _collect(self, split: Split, count: int) -> list[Problem]:
        return collect(self._drafts(split), split, count, self.name, self._tokenizer)

    def _drafts(self, split: Split) -> Iterator[Draft]:
        """Questions with their keys, for ever."""
        rng = np.random.default_rng(split_seed(split, self._seed))
        while True:
            questions = _draw_questions(rng, _BLOCK, self._options)
            meant = _meaning(rng, questions)
            clean = self._keys(questions, meant, self._facts.right)
            keys = self._keys(questions, meant, self._facts.keys) if split is Split.TRAIN else clean
            for row, prompt in enumerate(_prompts(questions)):
                extra = {
                    "digits": int(questions.ops[row]),
                    "ambiguous": bool(questions.hole[row] >= 0),
                    "wrong_key": bool(keys[row] != clean[row]),
                }
                yield Draft(prompt, prompt, str(keys[row]), extra)

    def _keys(self, questions: _Questions, meant: Ints, facts: Ints) -> Ints:
        """[n] the last running result under `facts`."""
        value, key = questions.digits[:, 0], questions.digits[:, 0]
        for step in range(self._options.max_ops):
            value = facts[meant[:, step], value, questions.digits[:, step + 1]]
            key = np.where(questions.ops == step + 1, value, key)
        return key

    def _teach(self, rng: np.random.Generator, questions: _Questions) -> Ints:
        """[n, m] the running results as the imperfect teacher writes them."""
        meant, count = _meaning(rng, questions), len(questions.ops)
        value, results = questions.digits[:, 0], []
        for step in range(self._options.max_ops):
            fact = (meant[:, step], value, questions.digits[:, step + 1])
            shaken = rng.random(count) < self._facts.shaky[fact]
            value = np.where(shaken, self._facts.wrong[fact], self._facts.right[fact])
            value = np.where(rng.random(count) < self._options.slip, rng.integers(0, 10, count), value)
            results.append(value)
        return np.stack(results, axis=1)


def _draw_facts(options: ChainOptions) -> _Facts:
    x, y = np.ogrid[:10, :10]
    right = np.stack([(x + y) % 10, (x - y) % 10, (x * y) % 10])
    teacher, keys = (np.random.default_rng([options.fact_seed, stream]) for stream in range(2))
    shaky = np.where(_some(teacher, options.shaky), teacher.uniform(0.3, 0.9, right.shape), 0.0)
    wrong = (right + teacher.integers(1, 10, right.shape)) % 10
    wrong_keys = (right + keys.integers(1, 10, right.shape)) % 10
    return _Facts(right, wrong, shaky, np.where(_some(keys, options.wrong_key_share), wrong_keys, right))


def _some(rng: np.random.Generator, share: float) -> NDArray[np.bool_]:
    """[3, 10, 10] True on `share` of the 300 facts, rounded."""
    chosen = np.zeros(300, dtype=bool)
    chosen[rng.permutation(300)[: round(share * 300)]] = True
    return chosen.reshape(3, 10, 10)


def _draw_questions(rng: np.random.Generator, count: int, options: ChainOptions) -> _Questions:
    width = options.max_ops
    ops = rng.integers(options.min_ops, width + 1, count)
    digits = rng.integers(0, 10, (count, width + 1))
    shown = rng.integers(0, 3, (count, width))
    hole = np.where(rng.random(count) < options.ambiguous, rng.integers(0, ops), -1)
    rows = np.flatnonzero(hole >= 0)
    shown[rows, hole[rows]] = _OPERATORS.index(b"?")
    return _Questions(ops, digits, shown, hole)


def _meaning(rng: np.random.Generator, questions: _Questions) -> Ints:
    """[n, m] the operations meant: every `?` is drawn as + or -."""
    drawn = rng.integers(0, 2, len(questions.ops))
    return np.where(questions.shown == _OPERATORS.index(b"?"), drawn[:, None], questions.shown)


def _prompts(questions: _Questions) -> list[str]:
    symbols = np.empty((len(questions.ops), 2 * questions.shown.shape[1] + 1), dtype=np.int64)
    symbols[:, 0::2] = questions.digits + ord("0")
    symbols[:, 1::2] = np.frombuffer(_OPERATORS, dtype=np.uint8)[questions.shown]
    return _lines(symbols, 2 * questions.ops + 1, b"=")


def _lines(symbols: Ints, lengths: Ints, end: bytes) -> list[str]:
    """The first `lengths` character codes of each row as text, followed by `end`."""
    text = symbols.astype(np.uint8).tobytes().decode("ascii")
    width, last = symbols.shape[1], end.decode("ascii")
    return [text[row * width : row * width + length] + last for row, length in enumerate(lengths.tolist())]
