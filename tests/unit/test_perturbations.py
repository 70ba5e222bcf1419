"""Other wordings of problems, and the policy's log-probs of responses behind them."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capo_megatron.config import DataConfig
from capo_megatron.data import load_data
from capo_megatron.data.chain import chain_tokenizer
from capo_megatron.data.perturbations import perturb
from capo_megatron.errors import DataError
from capo_megatron.rollout.collect import align
from capo_megatron.rollout.perturbed import perturbed_logprobs
from capo_megatron.seams import Signal, Weights
from capo_megatron.types import PolicyOutputs, Problem, RolloutBatch
from tests.unit.byte_tokenizer import byte_tokenizer

TEXTS = [
    "Tom has 12 apples and gives away 5. How many are left?",
    r"Find $\frac{3}{4}x + \sin(ab)$ where $x=10$, $ab=20$ cm.",
    "3+8*7=",
    "1+2",
    "{problem}",
    "Überlege: 7 Äpfel",
]


# --- wordings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["typo", "suffix", "scenario"])
def test_wordings_depend_on_the_text_alone_and_repeats_of_a_kind_differ(text: str, kind: str) -> None:
    found = perturb(text, [kind, "suffix" if kind == "typo" else "typo", kind, kind])
    assert found == perturb(text, [kind, "suffix" if kind == "typo" else "typo", kind, kind])
    same_kind = [found[0], found[2], found[3]]
    places = 2 if (kind, text) == ("typo", "1+2") else 3
    assert len(set(same_kind)) == places and text not in same_kind
    assert perturb(text, [kind])[0] == found[0]


@pytest.mark.parametrize("text", TEXTS)
def test_a_suffix_and_a_scenario_hold_the_problem_as_it_is(text: str) -> None:
    for wording in perturb(text, ["suffix", "scenario"] * 4):
        assert wording.count(text) == 1 and len(wording) > len(text)
        assert not re.search(r"\d", wording.replace(text, ""))  # no number that an answer could be made of


@pytest.mark.parametrize("text", TEXTS)
def test_a_typo_swaps_two_neighbours_and_keeps_every_digit_in_its_order(text: str) -> None:
    for wording in perturb(text, ["typo"] * 40):
        changed = [place for place, (a, b) in enumerate(zip(text, wording, strict=True)) if a != b]
        assert len(changed) == 2 and changed[1] == changed[0] + 1 and Counter(wording) == Counter(text)
        assert re.sub(r"\D", "", wording) == re.sub(r"\D", "", text)


def test_a_typo_stays_inside_words_and_out_of_commands_and_names() -> None:
    for wording in perturb(TEXTS[0], ["typo"] * 80):
        assert "Tom has 12 " in wording and " 5. How " in wording
        assert sorted(map(sorted, wording.split())) == sorted(map(sorted, TEXTS[0].split()))
    for wording in perturb(TEXTS[1], ["typo"] * 40):
        assert re.search(r"\\frac\{3\}\{4\}x \+ \\sin\(ab\)\$ w?.*\$x=10\$, \$ab=20\$ cm\.$", wording)
    assert perturb(r"\frac{1}{2}", ["typo"])[0].startswith(r"\frac")


@pytest.mark.parametrize("text", ["", "7", "77 77", "a", "aaaa", "1 2"])
def test_a_text_in_which_nothing_can_be_swapped_stays_as_it_is(text: str) -> None:
    assert perturb(text, ["typo", "typo"]) == [text, text]


# --- as prompts -----------------------------------------------------------------------------------------------------


def written(path: Path, **columns: list) -> str:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_wordings_go_through_the_template_and_those_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    texts = ["Add the numbers 1 and 2.", "Add the numbers 1 and 2, which are both rather small."]
    file = written(tmp_path / "set.jsonl", problem=texts, answer=["3", "3"])
    config = DataConfig(
        template="plain", train=(file,), perturbations=("typo", "suffix"), max_prompt_tokens=len(texts[1]) + 20
    )
    problems = {problem.prompt: problem for problem in load_data(config, tokenizer, seed=0).train}
    for text, lengths in zip(texts, (2, 1), strict=True):
        decoded = [tokenizer.decode(ids) for ids in problems[text].perturbed]
        assert decoded == perturb(text, ["typo", "suffix"])[:lengths]
    chat = load_data(replace(config, template="qwen25-math", max_prompt_tokens=999), tokenizer, seed=0).train
    for problem in chat:
        for ids, text in zip(problem.perturbed, perturb(_question(problem), ["typo", "suffix"]), strict=True):
            assert tokenizer.decode(ids) == problem.prompt.replace(_question(problem), text)


def _question(problem: Problem) -> str:
    return problem.prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]


def test_a_column_gives_each_problem_its_own_number_of_wordings(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    file = written(tmp_path / "a.jsonl", problem=["one", "two"], answer=["1", "2"], other=[["eins", "une"], []])
    config = DataConfig(template="plain", train=(file,), perturbed_column="other")
    found = {problem.prompt: problem.perturbed for problem in load_data(config, tokenizer, seed=0).train}
    assert [tokenizer.decode(ids) for ids in found["one"]] == ["eins", "une"] and found["two"] == ()
    for bad in ("eins", ["eins", ""], ["eins", 1], None):
        file = written(tmp_path / "b.jsonl", problem=["one"], answer=["1"], other=[bad])
        with pytest.raises(DataError, match="other must be a list of texts"):
            load_data(replace(config, train=(file,)), tokenizer, seed=0)


def test_wordings_that_a_tokenizer_of_characters_cannot_write_are_refused_with_what_to_use_instead() -> None:
    config = DataConfig(task="chain", task_size=4, template="plain", perturbations=("typo", "suffix", "scenario"))
    with pytest.raises(DataError, match=r"^data\.perturbations=\[typo, suffix, scenario\]: .* none for .*") as caught:
        load_data(config, chain_tokenizer(), seed=0)
    assert "Use data.perturbations=[typo, typo, typo]" in str(caught.value)
    assert load_data(replace(config, perturbations=("typo", "typo")), chain_tokenizer(), seed=0).train


# --- log-probs ------------------------------------------------------------------------------------------------------


@dataclass
class Summing:
    """A policy whose log-prob of a token is minus a number made of all tokens up to it: it tells prompts apart."""

    passes: list[RolloutBatch] = field(default_factory=list)

    def score(
        self, batch: RolloutBatch, needs: frozenset[Signal], which: Weights = "policy", top_k: int = 0
    ) -> PolicyOutputs:
        assert needs == frozenset() and which == "policy"
        self.passes.append(batch)
        place = torch.arange(1, batch.tokens.shape[1] + 1)
        return PolicyOutputs(-(batch.tokens * place).cumsum(dim=1)[:, 1:].float() * batch.response_mask)

    @staticmethod
    def of(prompt: tuple[int, ...], response: tuple[int, ...]) -> list[float]:
        tokens = torch.tensor([*prompt, *response])
        return (-(tokens * torch.arange(1, len(tokens) + 1)).cumsum(0)[len(prompt) :].float()).tolist()


def batch_of(rows: list[tuple[int, tuple[int, ...]]], problems: list[Problem], pad: int) -> RolloutBatch:
    tokens, mask = align([(problems[group].prompt_ids, response) for group, response in rows], pad)
    count = len(rows)
    return RolloutBatch(
        problems=tuple(problems),
        tokens=tokens,
        response_mask=mask,
        segment=mask.to(torch.uint8),
        group=torch.tensor([group for group, _ in rows]),
        rewards={"reward": torch.zeros(count), "correct": torch.zeros(count)},
        gradable=torch.ones(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape),
        policy_version=7,
    )


def test_tokens_keep_their_columns_behind_prompts_of_other_lengths() -> None:
    pad = 50
    problems = [
        Problem("two", "", (3, 4, 5), "", perturbed=((9,), (8, 8, 8, 8, 8, 8, 8))),
        Problem("none", "", (1,), ""),
        Problem("one", "", (6, 6), "", perturbed=((1, 2, 3, 4),)),
    ]
    rows = [(0, (11, 12, 13)), (1, (21,)), (2, (31, 32)), (0, ()), (2, (41, 42, 43, 44, 45)), (0, (51, pad))]
    batch, policy = batch_of(rows, problems, pad), Summing()
    found = perturbed_logprobs(policy, batch, pad)
    assert found.shape == (*batch.response_mask.shape, 2) and found.dtype == torch.float32
    for row, (group, response) in enumerate(rows):
        wordings = problems[group].perturbed
        for k in range(2):
            here = found[row, :, k]
            if k >= len(wordings):
                assert here.isnan().all()
                continue
            assert here[batch.response_mask[row]].tolist() == Summing.of(wordings[k], response)
            assert not here[~batch.response_mask[row]].any()
    assert [len(part) for part in policy.passes] == [5, 3]  # a pass for each k, of the problems that have it
    assert {part.policy_version for part in policy.passes} == {7}


def test_problems_without_wordings_cost_no_pass() -> None:
    policy = Summing()
    found: Tensor = perturbed_logprobs(policy, batch_of([(0, (1, 2))], [Problem("none", "", (1,), "")], 0), 0)
    assert found.shape == (1, 2, 0) and not policy.passes
