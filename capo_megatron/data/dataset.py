"""The problems of a run: read or generated, made into prompts, cleaned, and split."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from capo_megatron.config import DataConfig
from capo_megatron.data.perturbations import perturb, with_perturbations
from capo_megatron.data.problems import Row, digest, read_files
from capo_megatron.data.tasks import make_task
from capo_megatron.data.templates import load_template
from capo_megatron.data.tokenizer import encode
from capo_megatron.errors import DataError
from capo_megatron.types import Problem


@dataclass(frozen=True)
class Data:
    """The problems of a run. Training and validation share no problem.

    `dropped` counts what was left out, under `train/` or `validation/`: `no_answer`, `duplicate`,
    `conflicting_duplicate` (the same problem with another answer: one of the two is wrong), `in_validation`,
    `too_long`.
    """

    train: list[Problem]
    validation: list[Problem]
    dropped: Mapping[str, int]


def load_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, instruction: str | None = None
) -> Data:
    """The training and validation problems of a run, from files or a task; the same on every rank.

    Problems are the same if their texts are, up to white space and Unicode composition. With `validation` files,
    problems in them are taken out of training; without, `validation_size` problems are split off by a hash of (seed,
    id). `instruction` is added to every problem's text. Training problems get the other wordings that `config` asks
    for. Raises DataError, also if nothing is left to train on.
    """
    if config.task is not None:
        return _task_data(config, tokenizer, seed, instruction)
    if not config.train:
        raise DataError("data.train: no files. Name problem files, or set data.task.")
    rows, dropped = _clean_rows(config.train, config, "train/")
    validation: list[Problem] = []
    if config.validation:
        held_out, more = _clean_rows(config.validation, config, "validation/")
        validation, too_long = _problems(held_out, config, tokenizer, "validation/", instruction)
        known = {_normal(row.problem) for row in held_out}
        before, rows = len(rows), [row for row in rows if _normal(row.problem) not in known]
        dropped += more + too_long + Counter({"train/in_validation": before - len(rows)})
        _require(rows, "data.train: every problem is in the validation files, too.")
    train, too_long = _problems(rows, config, tokenizer, "train/", instruction)
    if not config.validation:
        train, validation = _split(train, config.validation_size, seed)
    return Data(train, validation, dict(+(dropped + too_long)))


def load_problems(
    paths: Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    instruction: str | None = None,
    published: bool = False,
) -> tuple[list[Problem], Mapping[str, int]]:
    """The problems of files, and how many were left out and why. `published`: see `read_files`. Raises DataError."""
    rows, dropped = _clean_rows(tuple(paths), config, "", published)
    problems, too_long = _problems(rows, config, tokenizer, "", instruction)
    return problems, dict(+(dropped + too_long))


def _task_data(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, instruction: str | None) -> Data:
    task = make_task(config, tokenizer, seed, instruction)
    problems = task.train_problems(config.task_size)
    if config.perturbations:
        wordings = [perturb(task.question(problem), config.perturbations) for problem in problems]
        problems = with_perturbations(problems, wordings, task.template, tokenizer, config)
    train, dropped = _short_enough(problems, config, "train/")
    validation, more = _short_enough(task.validation_problems(config.validation_size), config, "validation/")
    return Data(train, validation, dict(+(dropped + more)))


def _clean_rows(
    paths: tuple[str, ...], config: DataConfig, prefix: str, published: bool = False
) -> tuple[list[Row], Counter[str]]:
    """The rows of files without duplicates (the first of them stays)."""
    rows, dropped = read_files(paths, config, published)
    if config.dedupe:
        first: dict[str, Row] = {}
        for row in rows:
            kept = first.setdefault(_normal(row.problem), row)
            if kept is not row:
                dropped["duplicate" if kept.answer == row.answer else "conflicting_duplicate"] += 1
        rows = list(first.values())
    _require(rows, f"{', '.join(paths)}: no problem with an answer.")
    return rows, Counter({prefix + reason: count for reason, count in dropped.items()})


def _problems(
    rows: list[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase, prefix: str, instruction: str | None
) -> tuple[list[Problem], Counter[str]]:
    template = load_template(config.template, config.system_prompt, tokenizer, instruction)
    prompts = [template(row.problem) for row in rows]
    ids = _ids(rows)
    problems = [
        Problem(name, prompt, tuple(prompt_ids), row.answer, row.source)
        for name, prompt, prompt_ids, row in zip(ids, prompts, encode(tokenizer, prompts), rows, strict=True)
    ]
    if config.perturbations or config.perturbed_column is not None:
        wordings = [row.perturbed or perturb(row.problem, config.perturbations) for row in rows]
        problems = with_perturbations(problems, wordings, template, tokenizer, config)
    return _short_enough(problems, config, prefix)


def _ids(rows: list[Row]) -> list[str]:
    """One id per row: its column's, or a hash of problem and answer (with a number where dedupe let twins through)."""
    if not rows[0].id:
        seen: Counter[str] = Counter()
        names = []
        for row in rows:
            name = digest(row.problem, row.answer)
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
        return names
    places: dict[str, str] = {}
    for row in rows:
        if row.id in places:
            raise DataError(
                f"{row.place}: id {row.id!r} was used at {places[row.id]}. Unset data.id_column to hash ids."
            )
        places[row.id] = row.place
    return list(places)


def _short_enough(problems: list[Problem], config: DataConfig, prefix: str) -> tuple[list[Problem], Counter[str]]:
    kept = [problem for problem in problems if len(problem.prompt_ids) <= config.max_prompt_tokens]
    if problems and not kept:
        shortest = min(len(problem.prompt_ids) for problem in problems)
        raise DataError(
            f"data.max_prompt_tokens={config.max_prompt_tokens}: all {len(problems)} prompts are longer, the shortest "
            f"has {shortest} tokens. Nothing is left; raise it."
        )
    return kept, Counter({f"{prefix}too_long": len(problems) - len(kept)})


def _split(problems: list[Problem], size: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, validation): `size` problems chosen by hash, so that adding or reordering problems moves few of them."""
    if size >= len(problems):
        raise DataError(f"data.validation_size={size}: there {_are(len(problems))}, and training needs some. Lower it.")
    chosen = set(sorted((problem.id for problem in problems), key=lambda name: digest("validation", seed, name))[:size])
    train = [problem for problem in problems if problem.id not in chosen]
    return train, [problem for problem in problems if problem.id in chosen]


def _are(count: int) -> str:
    return "is only 1 problem" if count == 1 else f"are only {count} problems"


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _require(rows: list[Row], complaint: str) -> None:
    if not rows:
        raise DataError(f"{complaint} Nothing is left to use.")
