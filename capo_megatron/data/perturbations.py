"""Other wordings of a problem that leave its answer as it is, for algorithms that ask how stable a response is.

They come from a column of the problem files (`data.perturbed_column`: a list of texts, written beforehand by a person
or a model), or are made here (`data.perturbations`), from the problem's text alone and thus the same in every run:

    typo      two neighbouring letters of a word swapped. In a text without words, such as 3+8*7=, two symbols of which
              one is no digit: digits stay in order, but what is asked can no longer be told for certain
    suffix    a sentence that has nothing to do with the problem, added behind it
    scenario  the problem told as part of a little story

A kind may be named several times, and comes out differently each time: typos as long as a text has places for them,
the others four times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from capo_megatron.config import DataConfig
from capo_megatron.data.problems import digest
from capo_megatron.data.templates import Template
from capo_megatron.data.tokenizer import encode
from capo_megatron.errors import DataError
from capo_megatron.types import Problem

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_WORD = re.compile(r"(?<![^\W\d_])[^\W\d_]{4,}")
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


def typo(text: str, draw: int) -> str:
    """`text` with two different neighbours swapped; unchanged where there are none that may be.

    They are letters inside a word of four or more (not of a LaTeX command), where a reader sees what was meant. Without
    such a word: any two letters; without those: any two symbols of which one is no digit.
    """
    pairs = [place for place, (a, b) in enumerate(pairwise(text)) if a != b and not (a.isspace() or b.isspace())]
    in_words = {place for word in _WORD.finditer(text) for place in range(word.start(), word.end() - 1)}
    commands = {place for name in _COMMAND.finditer(text) for place in range(name.start(), name.end() - 1)}
    letters = [place for place in pairs if text[place : place + 2].isalpha() and place not in commands]
    others = [place for place in pairs if not text[place : place + 2].isdigit() and place not in commands]
    choices = [place for place in letters if place in in_words] or letters or others
    if not choices:
        return text
    place = choices[draw % len(choices)]
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]


def suffix(text: str, draw: int) -> str:
    """`text` and a sentence that does not matter."""
    return f"{text}\n{_SUFFIXES[draw % len(_SUFFIXES)]}"


def scenario(text: str, draw: int) -> str:
    """`text` inside a little story."""
    return _SCENARIOS[draw % len(_SCENARIOS)].replace("{problem}", text)


KINDS: dict[str, Callable[[str, int], str]] = {"typo": typo, "suffix": suffix, "scenario": scenario}


def perturb(text: str, kinds: Sequence[str]) -> list[str]:
    """One other wording of `text` for each of `kinds`."""
    repeats = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
    return [
        KINDS[kind](text, int(digest("perturbation", kind, text), 16) + repeat)
        for kind, repeat in zip(kinds, repeats, strict=True)
    ]


def with_perturbations(
    problems: Sequence[Problem],
    wordings: Sequence[Sequence[str]],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
) -> list[Problem]:
    """The problems with these other wordings as prompts; those of more than `max_prompt_tokens` are left out.

    Raises DataError if the tokenizer cannot write one: a model would be asked something else.
    """
    prompts = [[template(text) for text in texts] for texts in wordings]
    try:
        ids = iter(encode(tokenizer, [prompt for group in prompts for prompt in group]))
    except DataError as error:  # of the tokenizer, which knows nothing of perturbations
        raise DataError(f"{_option(config)}: {str(error).removeprefix('model.')} {_advice(config)}") from error
    longest, found = config.max_prompt_tokens, []
    for problem, group in zip(problems, prompts, strict=True):
        encoded = [tuple(next(ids)) for _ in group]
        for prompt, tokens in zip(group, encoded, strict=True):
            if (tokenizer.unk_token_id in tokens and tokenizer.unk_token_id is not None) or (prompt and not tokens):
                raise DataError(
                    f"{_option(config)}: the tokenizer cannot write the wording {prompt[:80]!r} of problem "
                    f"{problem.id!r}. {_advice(config)}"
                )
        found.append(replace(problem, perturbed=tuple(tokens for tokens in encoded if len(tokens) <= longest)))
    return found


def _option(config: DataConfig) -> str:
    return (
        f"data.perturbations=[{', '.join(config.perturbations)}]" if config.perturbations else "data.perturbed_column"
    )


def _advice(config: DataConfig) -> str:
    if not config.perturbations:
        return "Write the wordings with the symbols of the problems."
    typos = ", ".join(["typo"] * len(config.perturbations))
    return f"Use data.perturbations=[{typos}]: typos need no symbols of their own."
