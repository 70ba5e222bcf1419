"""Other wordings of a problem that leave its answer as it is, for algorithms that ask how stable a response is.

They come from a column of the problem files (`data.perturbed_column`: a list of texts, written beforehand by a person
or a model), or are made here (`data.perturbations`), from the problem's text alone and thus the same in every run:

    typo      two neighbouring letters swapped (other symbols where there are no two letters); digits stay in order
    suffix    a sentence that has nothing to do with the problem, added behind it
    scenario  the problem told as part of a little story

A kind may be named several times; each time it comes out differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from capo_megatron.data.problems import digest
from capo_megatron.data.templates import Template
from capo_megatron.data.tokenizer import encode
from capo_megatron.errors import DataError
from capo_megatron.types import Problem

_SUFFIXES = (
    "The lamp on the desk is green.",
    "It rained a little in the afternoon.",
    "A cat sleeps on the windowsill.",
    "The train to the coast leaves from platform seven.",
)
_SCENARIOS = (
    "A teacher wrote this problem on the blackboard:\n\n{problem}\n\nHelp the class to solve it.",
    "You find this note in an old library book:\n\n{problem}\n\nWork it out.",
    "Two friends on a long walk pass the time with a riddle:\n\n{problem}\n\nWhat do they find?",
    "On the last page of a newspaper stands this puzzle:\n\n{problem}\n\nSolve it.",
)


def typo(text: str, seed: str) -> str:
    """`text` with two different neighbours swapped: letters if possible, never two digits. Unchanged without a pair."""
    pairs = [place for place, (a, b) in enumerate(pairwise(text)) if a != b and not (a.isspace() or b.isspace())]
    letters = [place for place in pairs if text[place].isalpha() and text[place + 1].isalpha()]
    others = [place for place in pairs if not (text[place].isdigit() and text[place + 1].isdigit())]
    choices = letters or others
    if not choices:
        return text
    place = choices[_draw(seed, len(choices))]
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]


def suffix(text: str, seed: str) -> str:
    """`text` and a sentence that does not matter."""
    return f"{text}\n{_SUFFIXES[_draw(seed, len(_SUFFIXES))]}"


def scenario(text: str, seed: str) -> str:
    """`text` inside a little story."""
    return _SCENARIOS[_draw(seed, len(_SCENARIOS))].replace("{problem}", text)


KINDS: dict[str, Callable[[str, str], str]] = {"typo": typo, "suffix": suffix, "scenario": scenario}


def perturb(text: str, kinds: Sequence[str]) -> list[str]:
    """One other wording of `text` for each of `kinds`."""
    return [KINDS[kind](text, digest("perturbation", number, kind, text)) for number, kind in enumerate(kinds)]


def with_perturbations(
    problems: Sequence[Problem],
    wordings: Sequence[Sequence[str]],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> list[Problem]:
    """The problems with these other wordings as prompts; those of more than `longest` tokens are left out.

    Raises DataError if the tokenizer cannot write one: a model would be asked something else.
    """
    prompts = [[template(text) for text in texts] for texts in wordings]
    ids = iter(encode(tokenizer, [prompt for group in prompts for prompt in group]))
    found = []
    for problem, group in zip(problems, prompts, strict=True):
        encoded = [tuple(next(ids)) for _ in group]
        for prompt, tokens in zip(group, encoded, strict=True):
            _check_written(problem, prompt, tokens, tokenizer)
        found.append(replace(problem, perturbed=tuple(tokens for tokens in encoded if len(tokens) <= longest)))
    return found


def _check_written(problem: Problem, prompt: str, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    if (tokenizer.unk_token_id in tokens and tokenizer.unk_token_id is not None) or (prompt and not tokens):
        raise DataError(
            f"data.perturbations: the tokenizer cannot write the wording {prompt[:80]!r} of problem {problem.id!r}. "
            "Use typo, which needs no symbols of its own."
        )


def _draw(seed: str, count: int) -> int:
    return int(seed, 16) % count
