"""Evaluation: the records say what happened, and the numbers made from them can be counted by hand."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capo_megatron.errors import DataError
from capo_megatron.evaluation.paired import pair
from capo_megatron.evaluation.run import compare, evaluate, read_records, rescore, summarise, write_records
from capo_megatron.evaluation.table import table_of
from capo_megatron.evaluation.unfinished import Unfinished
from capo_megatron.seams import SamplingParams, Solo
from capo_megatron.types import EvalRecord, Grade, Problem, Verdict
from tests.unit.tiny_qwen2 import engine_of, mixed_problems, on_ranks, tiny_model

CORRECT, WRONG, UNPARSEABLE, TIMEOUT = (verdict.value for verdict in Verdict)
FLOAT32 = 1e-5  # log-prob sums of a dozen tokens from two float32 passes


def record(question="q0", sample=0, verdict=WRONG, mean=-1.0, **changes) -> EvalRecord:
    """A response of four tokens with the given mean log-prob."""
    values = {
        "question": question,
        "benchmark": "bench",
        "sample": sample,
        "prompt": "2 + 2 =",
        "response": "4",
        "extracted": None,
        "answer": "4",
        "correct": verdict == CORRECT,
        "verdict": verdict,
        "tokens": 4,
        "logprob_sum": 4 * mean,
        "truncated": False,
        "model": "base",
        "step": 0,
    }
    return EvalRecord(**(values | changes))


def group(question, *responses) -> list[EvalRecord]:
    """Records of one question from (verdict, mean log-prob) pairs."""
    return [record(question, sample, verdict, mean) for sample, (verdict, mean) in enumerate(responses)]


# --- sampling ---------------------------------------------------------------------------------------------------------


class Parity:
    """Correct: an even number of tokens; a lone 7 cannot be graded."""

    def grade(self, problems, responses):
        return [self._grade(response.split()) for response in responses]

    def _grade(self, tokens):
        if tokens == ["7"]:
            return Grade(Verdict.TIMEOUT, 0.0)
        return Grade(Verdict.WRONG if len(tokens) % 2 else Verdict.CORRECT, 0.0, tokens[-1] if tokens else None)

    def close(self):
        pass


PARAMS = SamplingParams(max_tokens=6, stop_ids=(3,), seed=5)


def run(engine, params=PARAMS, team=None, problems=None, samples=3, **options):
    problems = mixed_problems(7) if problems is None else problems
    team = team or Solo()
    return evaluate(engine, Parity(), problems, samples, params, team, 0, model="tiny", step=12, **options)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def records(model):
    return run(engine_of(model))


def test_there_is_one_record_per_response_with_its_question(records):
    assert [(item.question, item.sample) for item in records] == [
        (f"problem-{question}", sample) for question in range(7) for sample in range(3)
    ]
    assert {(item.model, item.step, item.schema) for item in records} == {("tiny", 12, 2)}
    for item in records:
        shown = item.response.split()
        assert item.tokens == len(shown) + (not item.truncated), "the stop token counts and is not shown"
        assert item.correct == (item.verdict == CORRECT)
        assert item.extracted == (shown[-1] if shown and item.verdict != TIMEOUT else None)


def test_logprobs_are_at_temperature_one_however_responses_are_sampled(model, records):
    engine = engine_of(model)
    for params in (
        PARAMS,
        replace(PARAMS, temperature=0.5),
        replace(PARAMS, temperature=0.0),
        replace(PARAMS, top_k=2),
    ):
        found = records if params == PARAMS else run(engine, params)
        sequences = [sequence_of(item) for item in found]
        expected = [sum(values) for values in engine.logprobs(sequences, 1.0)]
        np.testing.assert_allclose([item.logprob_sum for item in found], expected, rtol=FLOAT32, atol=FLOAT32)
    assert all(item.tokens > 0 for item in records)


def sequence_of(item: EvalRecord):
    prompts = {problem.id: problem.prompt_ids for problem in mixed_problems(7)}
    ids = [int(token) for token in item.response.split()]
    return prompts[item.question], ids + [3] * (not item.truncated)


class Stopped(Exception):
    pass


def test_an_evaluation_that_is_stopped_goes_on_where_it_was(model, records, tmp_path):
    unfinished = Unfinished(tmp_path / "eval" / "base.jsonl", "7 problems")

    def add_one(number, part):
        if number:
            raise Stopped
        unfinished.add(number, part)

    with pytest.raises(Stopped):
        run(engine_of(model), chunk_rows=9, keep=add_one)
    (torn,) = (tmp_path / "eval").iterdir()
    with torn.open("a") as file:
        file.write('{"records": [')  # a crash in the middle of a part
    assert Unfinished(tmp_path / "eval" / "base.jsonl", "8 problems").parts() == []
    earlier = unfinished.parts()
    assert [[(item.question, item.sample) for item in part] for part in earlier] == [
        [(f"problem-{question}", sample) for question in range(3) for sample in range(3)]
    ]
    made = []

    def add(number, part):
        made.append(number)
        unfinished.add(number, part)

    found = run(engine_of(model), chunk_rows=9, earlier=earlier, keep=add)
    assert made == [1, 2]
    assert [replace(item, logprob_sum=0.0) for item in found] == [replace(item, logprob_sum=0.0) for item in records]
    assert [item for part in unfinished.parts() for item in part] == found
    lines = torn.read_bytes().splitlines(keepends=True)
    for damaged in (
        [lines[0].replace(b"verdict", b"verdikt", 1), *lines[1:]],
        [lines[0], lines[0], *lines[1:]],  # by two evaluations at once
        [lines[0], lines[1][:-9], *lines[2:]],
    ):
        torn.write_bytes(b"".join(damaged))
        whole = unfinished.parts()
        assert [item for part in whole for item in part] == found[: 9 * len(whole)] and len(whole) < len(lines)
        assert len(torn.read_bytes().splitlines()) == len(whole)
    unfinished.remove()
    assert list((tmp_path / "eval").iterdir()) == []


@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, temperature=0.7)], ids=["sampler", "rescored"])
def test_records_do_not_depend_on_chunks_or_ranks(model, params):
    whole = run(engine_of(model), params)
    ranks = on_ranks(2, lambda team: run(engine_of(model, share=(team.rank, 2)), params, team, chunk_rows=9))
    replicas = on_ranks(2, lambda team: run(engine_of(model), params, team))
    for found in (run(engine_of(model), params, chunk_rows=1), *ranks, *replicas):
        assert [replace(item, logprob_sum=0.0) for item in found] == [replace(item, logprob_sum=0.0) for item in whole]
        sums = [item.logprob_sum for item in found], [item.logprob_sum for item in whole]
        np.testing.assert_allclose(*sums, rtol=FLOAT32, atol=FLOAT32)


def test_equal_ids_of_two_benchmarks_or_problems_stay_apart(model):
    twins = [Problem("1", "", (1, 2), "", source) for source in ("aime", "amc", "amc")]
    found = run(engine_of(model), problems=twins, samples=2, chunk_rows=1)
    assert [item.question for item in found] == ["1", "1", "amc/1", "amc/1", "1#2", "1#2"]
    assert len({item.response for item in found}) > 2, "each samples on its own"
    assert summarise(found)["questions"] == 3


def test_the_same_responses_can_be_rescored_by_another_model(model):
    written = [replace(item, prompt=" ".join(map(str, item.prompt_ids))) for item in mixed_problems(7)]
    found = run(engine_of(model), problems=written)

    def encode(texts):
        return [[int(token) for token in text.split()] for text in texts]

    again = rescore(engine_of(model), found, encode, 3, model="again", step=1)
    sums = [item.logprob_sum for item in again], [item.logprob_sum for item in found]
    np.testing.assert_allclose(*sums, rtol=FLOAT32, atol=FLOAT32)
    assert [item.tokens for item in again] == [item.tokens for item in found]
    (pairing,) = pair(table_of([*found, *again]), fixed_sample=True)
    assert pairing.same_responses


def test_no_problems_give_no_records(model):
    assert run(engine_of(model), problems=[]) == []


# --- files ------------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=()))
RECORDS = st.builds(
    EvalRecord,
    question=TEXT,
    benchmark=TEXT,
    sample=st.integers(0, 99),
    prompt=TEXT,
    response=TEXT,
    extracted=st.none() | TEXT,
    answer=TEXT,
    correct=st.booleans(),
    verdict=st.sampled_from([CORRECT, WRONG, UNPARSEABLE, TIMEOUT]),
    tokens=st.integers(0, 99),
    logprob_sum=st.floats(max_value=0, allow_nan=False, allow_infinity=False),
    truncated=st.booleans(),
    model=TEXT,
    step=st.integers(0, 99),
    lowest_logprobs=st.none() | st.lists(st.floats(max_value=0, allow_infinity=False), max_size=4).map(tuple),
    stated_confidence=st.none() | st.floats(0, 1),
)


@settings(max_examples=50, deadline=None)
@given(written=st.lists(RECORDS, min_size=1, max_size=5))
def test_records_read_back_as_they_were_written(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    write_records(path, written)
    assert read_records(path) == written


def test_an_absent_logprob_is_null_in_the_file_and_nan_in_memory(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [record(logprob_sum=math.nan)])
    assert json.loads(path.read_text())["logprob_sum"] is None
    assert math.isnan(read_records(path)[0].logprob_sum)


def test_records_of_schema_1_are_still_read(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, [record()])
    row = json.loads(path.read_text())
    assert not {"lowest_logprobs", "stated_confidence"} & set(row), "optional, so absent"
    path.write_text(json.dumps(row | {"schema": 1}))
    assert read_records(path) == [record(schema=1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "record 1: schema 3, expected 1 or 2"),
        ({"stated_confidence": "high"}, "record 1: stated_confidence='high', expected float | None"),
        ({"tokens": None}, "record 1: tokens=None, expected int"),
        ({"tokens": True}, "record 1: tokens=True, expected int"),
        ({"correct": 1}, "record 1: correct=1, expected bool"),
        ({"logprob_sum": "x"}, "record 1: logprob_sum='x', expected float"),
    ],
)
def test_a_row_that_is_no_record_is_named(tmp_path, change, message):
    path = tmp_path / "records.jsonl"
    write_records(path, [record()])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=re.escape(f"{path}: {message}")):
        read_records(path)


def test_a_missing_column_and_an_empty_file_are_named(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"question": "q"}\n')
    with pytest.raises(DataError, match=r"record 1: 'benchmark' is missing, found question"):
        read_records(path)
    path.write_text("")
    with pytest.raises(DataError, match="no records in it"):
        read_records(path)


# --- one model --------------------------------------------------------------------------------------------------------


def test_the_summary_can_be_counted_by_hand():
    found = summarise(
        [
            *group("mixed", (CORRECT, -0.1), (CORRECT, -0.5), (WRONG, -0.3), (WRONG, -0.9)),  # 3 of 4 pairs in order
            *group("right", (CORRECT, -0.2), (CORRECT, -0.2), (CORRECT, -0.2), (CORRECT, -0.2)),
            *group("wrong", (WRONG, -0.4), (WRONG, -0.4), (WRONG, -0.4), (WRONG, -0.4)),
            *group("cut", (CORRECT, -0.2), (TIMEOUT, -0.1), (WRONG, -0.2), (WRONG, -0.2)),  # ties count a half
        ]
    )
    assert found["accuracy"] == pytest.approx((0.5 + 1 + 0 + 0.25) / 4)
    assert found["accuracy_se"] == pytest.approx(np.std([0.5, 1, 0, 0.25], ddof=1) / 2)
    assert found["pass_at_n"] == pytest.approx(3 / 4)
    assert found["auc_mean"] == pytest.approx((0.75 + 0.5) / 2)
    assert found["auc_mean_se"] == pytest.approx(0.125)
    assert (found["auc_questions"], found["questions"], found["samples"]) == (2, 4, 4)
    assert found["logprob_correct"] == pytest.approx((-0.1 - 0.5 - 4 * 0.2 - 0.2) / 7)
    assert found["logprob_wrong"] == pytest.approx((-0.3 - 0.9 - 4 * 0.4 - 2 * 0.2) / 8)
    assert (found["timeout"], found["unparseable"], found["truncated"]) == (1 / 16, 0, 0)
    assert found["tokens"] == 4


def test_an_unreadable_reference_answer_makes_nobody_wrong():
    solid = group("a", (CORRECT, -0.1), (WRONG, -0.2))
    found = summarise([*solid, *group("b", (UNPARSEABLE, -0.1), (UNPARSEABLE, -0.2))])
    assert found["unparseable"] == 0.5
    alone = summarise(solid)
    np.testing.assert_equal(found, alone | {"unparseable": 0.5})


def test_an_empty_response_is_wrong_but_has_no_confidence():
    empty = record("a", 2, WRONG, tokens=0, logprob_sum=0.0)
    found = summarise([*group("a", (CORRECT, -0.1), (WRONG, -0.2)), empty])
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["auc_mean"] == 1
    assert found["logprob_wrong"] == pytest.approx(-0.2)


def test_what_is_undefined_is_nan_and_warns_nobody(recwarn):
    one_class = summarise(group("a", (CORRECT, -0.1), (CORRECT, -0.2)))
    assert one_class["accuracy"] == 1
    assert all(math.isnan(one_class[name]) for name in ("auc_mean", "auc_mean_se", "auc_pooled", "logprob_wrong"))
    assert one_class["auc_questions"] == 0
    unreadable = summarise(group("a", (UNPARSEABLE, -0.1)))
    assert math.isnan(unreadable["accuracy"]) and math.isnan(unreadable["auc_mean"]) and unreadable["questions"] == 0
    assert not recwarn.list


def test_questions_with_different_numbers_of_samples_weigh_the_same():
    found = summarise(
        [*group("a", (CORRECT, -1), (WRONG, -2), (WRONG, -2), (WRONG, -3)), *group("b", (CORRECT, -1), (WRONG, -1))]
    )
    assert found["accuracy"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert found["samples"] == 2
    assert found["pass_at_n"] == pytest.approx((1 - (3 / 4) * (2 / 3) + 1) / 2), "pass@2 of both"


def test_no_records_and_repeated_ones_are_refused():
    with pytest.raises(DataError, match="no records"):
        summarise([])
    with pytest.raises(DataError, match="question 'q0' of 'bench' has sample 0 twice"):
        summarise([record(), record()])


# --- several models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def models():
    """Three questions; `sharp` solves the second one, so that only the first is mixed under all."""
    base = [
        *group("a", (CORRECT, -0.1), (WRONG, -0.2), (WRONG, -0.05)),
        *group("b", (CORRECT, -0.1), (WRONG, -0.2), (WRONG, -0.3)),
        *group("c", (WRONG, -0.1), (WRONG, -0.2), (WRONG, -0.3)),
    ]
    sharp = [
        *group("a", (CORRECT, -0.1), (WRONG, -0.2), (WRONG, -0.3)),
        *group("b", (CORRECT, -0.1), (CORRECT, -0.2), (CORRECT, -0.3)),
        *group("c", (WRONG, -0.1), (WRONG, -0.2), (CORRECT, -0.3)),
    ]
    return {"base": base, "sharp": sharp}


def test_models_are_compared_on_the_questions_mixed_under_both(models):
    found = compare(models["base"], {"sharp": models["sharp"], "same": models["base"]})
    assert found.models["base"]["auc_mean"] == pytest.approx((0.5 + 1) / 2)
    assert found.models["sharp"]["auc_mean"] == pytest.approx((1 + 0) / 2)
    by_name = {(pair.first, pair.second): pair for pair in found.pairs}
    assert list(by_name) == [("base", "sharp"), ("base", "same"), ("sharp", "same")]
    pair = by_name["base", "sharp"]
    assert (pair.questions, pair.auc_first, pair.auc_second) == (1, 0.5, 1.0)
    assert math.isnan(pair.low), "one question has no spread"
    same = by_name["base", "same"]
    assert (same.questions, same.difference, same.low, same.high) == (2, 0.0, 0.0, 0.0)


def test_models_with_different_questions_are_not_compared(models):
    models["sharp"] = [item for item in models["sharp"] if item.question != "c"]
    with pytest.raises(
        DataError, match="base answered 3 questions, sharp 2, and 1 questions were answered by only one"
    ):
        compare(models["base"], {"sharp": models["sharp"]})


def test_the_table_shows_every_number_that_keeps_it_honest(models):
    lines = str(compare(models["base"], {"sharp": models["sharp"]})).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "model",
        "mean@3",
        "pass@3",
        "AUC-mean",
        "mixed",
        "paired AUC vs base",
        "pooled AUC",
        "log-prob",
    ]
    assert cells[2] == ["base", "0.222 ± 0.111", "0.667", "0.750 ± 0.250", "2 of 3", "", "0.786", "-0.172"]
    assert cells[3][:6] == ["sharp", "0.556 ± 0.222", "1.000", "0.500 ± 0.500", "2 of 3", "0.500 -> 1.000 (1)"]
    assert cells[-1] == ["base -> sharp", "1", "0.500 -> 1.000", "+0.500 (undefined to undefined)"]
    assert len({len(line) for line in lines[:4]}) == 1, "aligned"


def test_every_two_models_are_paired_and_a_name_cannot_break_the_table(models):
    text = str(compare(models["base"], {"sharp": models["sharp"], "b|c": models["base"]}, base_name="start"))
    for part in (
        "start -> sharp",
        "start -> b\\|c",
        "sharp -> b\\|c",
        "+0.000 (+0.000 to +0.000)",
        "paired AUC vs start",
    ):
        assert part in text


def test_an_undefined_number_is_called_so():
    text = str(compare(group("a", (CORRECT, -0.1)), {"other": group("a", (WRONG, -0.1))}))
    assert "undefined ± undefined" in text
    assert "undefined -> undefined (0)" in text
