"""Every rank ends up with the same whole rollout, aligned as `types` says, or with the same error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import pytest
import torch
from torch import Tensor

from capo_megatron.errors import RewardError, RolloutError
from capo_megatron.rollout.collect import Collected, collect, share_of
from capo_megatron.seams import SamplingParams, Solo
from capo_megatron.types import Grade, Problem, Sample, Segment, Verdict
from tests.unit.tiny_qwen2 import ThreadTeam, engine_of, mixed_problems, on_ranks, tiny_model

PAD = 99
A, B, C, D, END = 1, 2, 3, 4, 5
PARAMS = SamplingParams(8)


class Script:
    """An engine that answers from a table: problem id -> response ids of its samples. Log-probs are -0.1, -0.2, ..."""

    def __init__(self, answers: dict[str, list[tuple[int, ...]]], share: tuple[int, int] = (0, 1), version: int = 3):
        self.answers, self.share, self.version = answers, share, version
        self.asked: list[str] = []

    def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        self.asked += [problem.id for problem in problems]
        return [[self._sample(ids) for ids in self.answers[problem.id][:samples]] for problem in problems]

    def _sample(self, ids: tuple[int, ...]) -> Sample:
        logprobs = tuple(-(position + 1) / 10 for position in range(len(ids)))
        return Sample(ids, logprobs, " ".join(map(str, ids)), ids[-1] != END, self.version)

    def logprobs(self, sequences: object, temperature: float) -> list[list[float]]:
        return []

    def load_weights(self, hf: Iterable[tuple[str, Tensor]], version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class ByText:
    """Grades by a function of the response's text."""

    def __init__(self, grade: Callable[[str], Grade]) -> None:
        self._grade = grade
        self.seen: list[tuple[str, str]] = []

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        self.seen += [(problem.id, text) for problem, text in zip(problems, responses, strict=True)]
        return [self._grade(text) for text in responses]

    def close(self) -> None: ...


def ends_well(text: str) -> Grade:
    right = text.endswith(str(END))
    return Grade(Verdict.CORRECT if right else Verdict.WRONG, reward=1.0 if right else -0.5, extracted=text[:1])


def problem(name: str, *prompt: int) -> Problem:
    return Problem(name, "", prompt or (A,), "")


def same(first: Collected, second: Collected) -> bool:
    """Equal in everything but time."""
    tensors = ("tokens", "response_mask", "segment", "group", "gradable", "truncated", "sampler_logprobs")
    return (
        all(torch.equal(getattr(first.batch, name), getattr(second.batch, name)) for name in tensors)
        and first.batch.rewards.keys() == second.batch.rewards.keys()
        and all(torch.equal(value, second.batch.rewards[name]) for name, value in first.batch.rewards.items())
        and first.batch.problems == second.batch.problems
        and first.batch.policy_version == second.batch.policy_version
        and (first.texts, first.grades, first.sampled) == (second.texts, second.grades, second.sampled)
    )


def test_columns_are_target_aligned_as_in_the_example_of_types() -> None:
    engine = Script({"x": [(C, D, END)], "y": [(C, D, D)]})
    found = collect(engine, ByText(ends_well), [problem("x", A, B), problem("y", A, B, B)], 1, PARAMS, Solo(), PAD, 3)
    batch = found.batch
    assert batch.tokens.tolist() == [[A, B, C, D, END, PAD], [A, B, B, C, D, D]]
    mask = [[False, True, True, True, False], [False, False, True, True, True]]
    assert batch.response_mask.tolist() == mask
    assert batch.segment.tolist() == [[Segment.REASONING if on else Segment.NONE for on in row] for row in mask]
    expected = torch.tensor([[0, -0.1, -0.2, -0.3, 0], [0, 0, -0.1, -0.2, -0.3]])
    torch.testing.assert_close(batch.sampler_logprobs, expected)
    assert batch.rewards["reward"].tolist() == [1.0, -0.5]
    assert batch.rewards["correct"].tolist() == [1.0, 0.0]
    assert batch.truncated.tolist() == [False, True]
    assert batch.lengths.tolist() == [5, 6]
    assert batch.policy_version == 3
    assert found.texts == [f"{C} {D} {END}", f"{C} {D} {D}"]
    assert [grade.extracted for grade in found.grades] == ["3", "3"]


def test_siblings_are_adjacent_and_grouped_by_problem() -> None:
    engine = Script({name: [(C, END), (D, D, END), (END,)] for name in "xyz"})
    reward = ByText(ends_well)
    found = collect(engine, reward, [problem(name) for name in "xyz"], 3, PARAMS, Solo(), PAD)
    assert found.batch.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [problem.id for problem in found.batch.problems] == ["x", "y", "z"]
    assert [name for name, _ in reward.seen] == ["x"] * 3 + ["y"] * 3 + ["z"] * 3
    assert found.batch.tokens[:, 1].tolist() == [C, D, END] * 3


def test_shares_are_contiguous_balanced_and_complete() -> None:
    for count in range(12):
        for shares in range(1, 6):
            parts = [list(share_of(count, (index, shares))) for index in range(shares)]
            assert list(chain(*parts)) == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(RolloutError, match=r"share \(2, 2\)"):
        share_of(4, (2, 2))


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_all_ranks_hold_the_same_whole_whatever_their_number(ranks: int) -> None:
    answers = {
        str(index): [tuple([C] * (1 + (index + sample) % 4) + [END]) for sample in range(2)] for index in range(5)
    }
    problems = [problem(str(index), *[A] * (1 + index % 3)) for index in range(5)]
    alone = collect(Script(answers), ByText(ends_well), problems, 2, PARAMS, Solo(), PAD, 3)

    def work(team: ThreadTeam) -> tuple[Collected, list[str]]:
        engine = Script(answers, (team.rank, team.size))
        return collect(engine, ByText(ends_well), problems, 2, PARAMS, team, PAD, 3), engine.asked

    outcomes = on_ranks(ranks, work)
    assert all(same(alone, found) for found, _ in outcomes)
    assert list(chain(*(asked for _, asked in outcomes))) == [str(index) for index in range(5)]


def test_ranks_that_share_one_engine_count_once() -> None:
    answers = {name: [(C, END)] for name in "xy"}
    problems = [problem("x"), problem("y")]
    alone = collect(Script(answers), ByText(ends_well), problems, 1, PARAMS, Solo(), PAD)
    outcomes = on_ranks(
        4, lambda team: collect(Script(answers, (team.rank // 2, 2)), ByText(ends_well), problems, 1, PARAMS, team, PAD)
    )
    assert all(same(alone, found) for found in outcomes)


def test_real_engines_on_two_ranks_sample_what_one_samples() -> None:
    model, problems = tiny_model(), mixed_problems(5)
    params = SamplingParams(12, stop_ids=(3,))
    alone = collect(engine_of(model), ByText(ends_well), problems, 2, params, Solo(), PAD, 0)

    def work(team: ThreadTeam) -> Collected:
        engine = engine_of(model, share=(team.rank, team.size))
        return collect(engine, ByText(ends_well), problems, 2, params, team, PAD, 0)

    first, second = on_ranks(2, work)
    assert same(first, second)
    assert torch.equal(first.batch.tokens, alone.batch.tokens)
    # Batches of another shape: the same samples, log-probs up to float32 rounding.
    torch.testing.assert_close(first.batch.sampler_logprobs, alone.batch.sampler_logprobs, atol=1e-5, rtol=0)


def test_a_problem_that_occurs_twice_gets_different_samples() -> None:
    model, twice = tiny_model(initializer_range=0.1), mixed_problems(1) * 2
    found = collect(engine_of(model), ByText(ends_well), twice, 2, SamplingParams(20), Solo(), PAD)
    assert len({tuple(row) for row in found.batch.tokens.tolist()}) == 4
    assert [problem.id for problem in found.batch.problems] == ["problem-0", "problem-0"]


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    class Broken(Script):
        def generate(self, *_: object) -> list[list[Sample]]:
            raise RolloutError("problem 'y': non-finite logits")

    def refuse(text: str) -> Grade:
        raise RewardError("the grading workers died")

    problems = [problem(name) for name in "xyz"]
    answers = {name: [(C, END)] for name in "xyz"}

    def engine_fails(team: ThreadTeam) -> Collected:
        engine = (Broken if team.rank == 1 else Script)(answers, (team.rank, team.size))
        return collect(engine, ByText(ends_well), problems, 1, PARAMS, team, PAD)

    def reward_fails(team: ThreadTeam) -> Collected:
        reward = ByText(ends_well if team.rank == 0 else refuse)
        return collect(Script(answers, (team.rank, team.size)), reward, problems, 1, PARAMS, team, PAD)

    for work, kind, message in (
        (engine_fails, RolloutError, "rank 1: problem 'y': non-finite logits"),
        (reward_fails, RewardError, "rank 1: the grading workers died (1 more ranks failed)"),
    ):
        outcomes = on_ranks(3, work)
        assert [type(outcome) for outcome in outcomes] == [kind] * 3
        assert {str(outcome) for outcome in outcomes} == {message}


def test_stale_or_different_weights_are_refused_on_all_ranks() -> None:
    answers = {name: [(C, END)] for name in "xy"}
    problems = [problem("x"), problem("y")]
    for version, expected, message in ((None, [3, 4], r"versions \[3, 4\]"), (4, [3, 4], "it holds policy version 3")):

        def work(team: ThreadTeam, version: int | None = version, held: list[int] = expected) -> Collected:
            engine = Script(answers, (team.rank, team.size), held[team.rank])
            return collect(engine, ByText(ends_well), problems, 1, PARAMS, team, PAD, version)

        for outcome in on_ranks(2, work):
            with pytest.raises(RolloutError, match=message):
                raise outcome


def test_weights_that_come_while_responses_are_sampled_are_noticed() -> None:
    class Refitted(Script):
        def _sample(self, ids: tuple[int, ...]) -> Sample:
            self.version = 4 + len(self.asked)
            return super()._sample(ids)

    with pytest.raises(RolloutError, match=r"by policy version 3, and responses are by \[6\]\. Load no weights"):
        problems = [problem("x"), problem("y")]
        collect(Refitted({name: [(C, END)] for name in "xy"}), ByText(ends_well), problems, 1, PARAMS, Solo(), PAD)


def test_shares_that_leave_a_problem_out_are_refused() -> None:
    answers = {name: [(C, END)] for name in "xy"}
    with pytest.raises(RolloutError, match="no whole"):
        collect(Script(answers, (0, 2)), ByText(ends_well), [problem("x"), problem("y")], 1, PARAMS, Solo(), PAD)


# --- responses on which the engine gave up ----------------------------------------------------------------------------


def test_a_group_that_lost_a_response_goes_on_with_the_others() -> None:
    answers = {"x": [(C, END), (D, END)], "y": [(C, C, END)], "z": [(END,), (D,)]}
    problems = [problem(name) for name in "xyz"]

    def work(team: ThreadTeam) -> Collected:
        engine = Script(answers, (team.rank, team.size))
        return collect(engine, ByText(ends_well), problems, 2, PARAMS, team, PAD, max_dropped=0.2)

    alone = collect(Script(answers), ByText(ends_well), problems, 2, PARAMS, Solo(), PAD, max_dropped=0.2)
    assert alone.batch.group.tolist() == [0, 0, 1, 2, 2]
    assert alone.texts == [f"{C} {END}", f"{D} {END}", f"{C} {C} {END}", f"{END}", f"{D}"]
    assert alone.batch.rewards["correct"].tolist() == [1, 1, 1, 1, 0]
    assert (alone.dropped, alone.metrics()["rollout/dropped"]) == (1, 1.0)
    assert all(same(alone, found) and found.dropped == 1 for found in on_ranks(3, work))


def test_a_problem_that_lost_all_its_responses_is_left_out() -> None:
    answers = {"x": [(C, END), (D, END)], "y": [], "z": [(END,), (D,)]}
    problems = [problem(name) for name in "xyz"]
    found = collect(Script(answers), ByText(ends_well), problems, 2, PARAMS, Solo(), PAD, max_dropped=0.5)
    assert [kept.id for kept in found.batch.problems] == ["x", "z"]
    assert found.batch.group.tolist() == [0, 0, 1, 1]
    assert (found.dropped, found.offered, len(found.batch)) == (2, 3, 4)
    other = collect(Script({"w": [(C, END)] * 2}), ByText(ends_well), [problem("w")], 2, PARAMS, Solo(), PAD)
    assert Collected.join([found, other], PAD).dropped == 2


def test_more_lost_responses_than_are_allowed_end_the_run_on_all_ranks() -> None:
    answers = {"x": [(C, END)], "y": [(D, END), (END,)]}
    problems = [problem("x"), problem("y")]

    def work(team: ThreadTeam) -> Collected:
        engine = Script(answers, (team.rank, team.size))
        return collect(engine, ByText(ends_well), problems, 2, PARAMS, team, PAD, max_dropped=0.2)

    said = "rollout.max_dropped=0.2: the engine gave up on 1 of 4 responses, also when they were asked for again"
    for outcome in on_ranks(2, work):
        assert isinstance(outcome, RolloutError) and str(outcome).startswith(said)
    with pytest.raises(RolloutError, match=r"max_dropped=0: .* 1 of 4"):  # an evaluation, for example
        collect(Script(answers), ByText(ends_well), problems, 2, PARAMS, Solo(), PAD)


def test_more_responses_than_were_asked_for_are_refused() -> None:
    class Eager(Script):
        def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
            return super().generate(problems, samples + 1, params)

    with pytest.raises(RolloutError, match="2 responses to 1 problems x 1 samples"):
        collect(Eager({"x": [(C, END)] * 2}), ByText(ends_well), [problem("x")], 1, PARAMS, Solo(), PAD)


def test_extra_rewards_become_columns_and_ungradable_rows_earn_nothing() -> None:
    grades = iter(
        [
            Grade(Verdict.CORRECT, 1.0, extra={"confidence": 0.75}),
            Grade(Verdict.TIMEOUT, math.nan),
            Grade(Verdict.WRONG, 0.0, extra={"confidence": 0.5}),
            Grade(Verdict.UNPARSEABLE, 5.0, extra={"confidence": 0.25}),
        ]
    )
    engine = Script({"x": [(END,)] * 4})
    found = collect(engine, ByText(lambda _: next(grades)), [problem("x")], 4, PARAMS, Solo(), PAD)
    assert found.batch.rewards["confidence"].tolist() == [0.75, 0.0, 0.5, 0.0]
    assert found.batch.rewards["reward"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert found.batch.gradable.tolist() == [True, False, True, False]
    assert found.batch.correct.tolist() == [True, False, False, False]
    shares = {name: value for name, value in found.metrics().items() if name.startswith("verdict/")}
    assert shares == {f"verdict/{verdict.value}": 0.25 for verdict in Verdict}


@pytest.mark.parametrize(
    ("grades", "message"),
    [
        ([Grade(Verdict.WRONG, 0.0), Grade(Verdict.WRONG, 0.0, extra={"length": 1.0})], "extras"),
        ([Grade(Verdict.WRONG, 0.0, extra={"correct": 1.0})] * 2, "extras"),
        ([Grade(Verdict.WRONG, 0.0), Grade(Verdict.WRONG, math.nan)], "not finite"),
        ([Grade(Verdict.WRONG, 0.0)], "1 grades for 2 responses"),
    ],
)
def test_grades_that_cannot_be_put_together_are_refused(grades: list[Grade], message: str) -> None:
    class Fixed(ByText):
        def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
            return grades

    with pytest.raises(RewardError, match=message):
        collect(Script({"x": [(END,)] * 2}), Fixed(ends_well), [problem("x")], 2, PARAMS, Solo(), PAD)


def test_selected_and_joined_rollouts_equal_those_of_the_remaining_problems() -> None:
    answers = {
        "x": [(C, END), (C,)],
        "y": [(D, D, D, D, END), (D,)],
        "z": [(END,), (C, C, END)],
        "w": [(D, END), (D, D, D)],
    }

    def of(*names: str) -> Collected:
        return collect(Script(answers), ByText(ends_well), [problem(name) for name in names], 2, PARAMS, Solo(), PAD)

    first, second = of("x", "y"), of("z", "w")
    joined = Collected.join([first.select([1]), second.select([1, 0])], PAD)
    assert joined.sampled == first.sampled + second.sampled  # the time spent is for all of them
    assert joined.texts == of("y", "w", "z").texts
    assert torch.equal(joined.batch.tokens, of("y", "w", "z").batch.tokens)
    assert torch.equal(joined.batch.sampler_logprobs, of("y", "w", "z").batch.sampler_logprobs)
    assert joined.batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert [problem.id for problem in joined.batch.problems] == ["y", "w", "z"]
    assert torch.equal(joined.batch.rewards["reward"], of("y", "w", "z").batch.rewards["reward"])
    assert second.group(1).tokens.tolist() == second.batch.tokens[2:].tolist()
    assert len(first.select([]).batch) == 0
