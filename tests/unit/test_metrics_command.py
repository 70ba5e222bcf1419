"""`capo-megatron metrics` and `calibrate`: numbers that can be counted by hand, foreign files, and records gone bad."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capo_megatron.cli import main
from capo_megatron.errors import DataError
from capo_megatron.evaluation.abstention import apply, fit, read_rule, write_rule
from capo_megatron.evaluation.metrics import Confidence, measure
from capo_megatron.evaluation.paired import match_accuracy, pair, sign_flip_p
from capo_megatron.evaluation.records import to_line, write_records
from capo_megatron.evaluation.selection import expected_accuracy, keep_matrix, rpc_keep, select_answer
from capo_megatron.evaluation.table import read_table, table_of
from capo_megatron.evaluation.votes import METHODS, vote
from capo_megatron.types import EvalRecord, Verdict

RIGHT, WRONG, UNPARSEABLE, TIMEOUT = (verdict.value for verdict in Verdict)


def record(question="q", sample=0, verdict=WRONG, mean=-1.0, answer="0", **changes) -> EvalRecord:
    values = {
        "question": question,
        "benchmark": "bench",
        "sample": sample,
        "prompt": "?",
        "response": f"{answer}, {sample}",
        "extracted": answer,
        "answer": "1",
        "correct": verdict == RIGHT,
        "verdict": verdict,
        "tokens": 4,
        "logprob_sum": 4 * mean,
        "truncated": False,
        "model": "base",
        "step": 0,
    }
    return EvalRecord(**(values | changes))


def group(question, *responses, **changes) -> list[EvalRecord]:
    """Records from (verdict, mean log-prob, answer)."""
    return [
        record(question, n, verdict, mean, answer, **changes) for n, (verdict, mean, answer) in enumerate(responses)
    ]


MIXED = group("mixed", (RIGHT, -0.1, "1"), (RIGHT, -0.5, "1"), (WRONG, -0.3, "2"), (WRONG, -0.9, "3"))
EASY = group("easy", *[(RIGHT, -0.2, "1")] * 4)
HARD = group("hard", (WRONG, -0.1, "5"), (WRONG, -0.4, "5"), (WRONG, -0.4, "6"), (TIMEOUT, -0.4, None))


def only(records: list[EvalRecord], **options):
    (found,) = measure(table_of(records), **options)
    return found


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_numbers_can_be_counted_by_hand() -> None:
    found = only([*MIXED, *EASY, *HARD])
    want = {
        "accuracy": 0.5,
        "pass_at_k": 2 / 3,
        "auc_mean": 0.75,
        "auc_questions": 1,
        "questions": 3,
        "samples": 4,
        "sc": 2 / 3,
        "ppl": 2 / 3,
        "pc": 2 / 3,
        "scored": 11 / 12,  # not the timeout
        "timeout": 1 / 12,
        "tokens": 4,
        "sc/aurc": (0 + 0 + 1 / 3) / 3,  # the shares are 1, 0.5, 0.5; of the tied two one is right
    }
    want["sc/aurc"] = (0 + 0.5 / 2 + 1 / 3) / 3
    for name, value in want.items():
        assert found.values[name] == pytest.approx(value), name
    assert found.by_samples["pass"][0] == pytest.approx(0.5)
    assert found.by_samples["sc"][3] == found.values["sc"]
    assert found.by_samples["sc"][0] == pytest.approx(0.5, abs=0.1), "one random sample: the accuracy"
    assert found.curves["responses"][-1][1:] == (1.0, pytest.approx(6 / 11))


def test_confidences_can_be_chosen() -> None:
    rows = [
        replace(item, tokens=2 + n, lowest_logprobs=(-3.0 + n, -1.0), stated_confidence=0.2 * n)
        for n, item in enumerate(MIXED)
    ]
    for text, score in (
        ("perplexity", [4 * -0.1 / 2, 4 * -0.5 / 3, 4 * -0.3 / 4, 4 * -0.9 / 5]),
        ("sum", [-0.4, -2.0, -1.2, -3.6]),
        ("lowest-1", [-3.0, -2.0, -1.0, 0.0]),
        ("lowest-2", [-2.0, -1.5, -1.0, -0.5]),
        ("stated", [0.0, 0.2, 0.4, 0.6]),
    ):
        kind = Confidence.parse(text)
        if text.startswith("lowest"):
            rows = [replace(item, lowest_logprobs=tuple(sorted(item.lowest_logprobs))) for item in rows]
            score = [np.mean(item.lowest_logprobs[: kind.count]) for item in rows]
        assert kind.of(table_of(rows, kind.count)).tolist() == pytest.approx(score), text


answers = st.lists(
    st.tuples(st.sampled_from([None, "1", "2", "3"]), st.integers(1, 40), st.sampled_from("abc")),
    min_size=6,
    max_size=6,
)


@settings(max_examples=20, deadline=None)
@given(st.lists(answers, min_size=1, max_size=4))
def test_all_questions_at_once_select_what_one_question_at_a_time_does(questions) -> None:
    rows = [
        record(str(q), n, RIGHT if answer == "1" else WRONG, -mean / 20, answer, response=f"{answer}{text}")
        for q, samples in enumerate(questions)
        for n, (answer, mean, text) in enumerate(samples)
    ]
    table = table_of(rows)
    mean = table.logprob_sum / table.tokens
    found = vote(table, mean, 6)
    by_question = {name: index for index, name in enumerate(dict.fromkeys(table.question.tolist()))}
    for q, samples in enumerate(questions):
        texts, logs, names = zip(*[(a, -m / 20, f"{a}{t}") for a, m, t in samples], strict=True)
        row = by_question[table.names["question"].index(str(q))]
        for method in METHODS:
            want = expected_accuracy(select_answer(texts, logs, names, method), lambda item: item == "1")
            if method in ("sc", "ppl"):  # equal texts of different likelihood count by the first, whose order is drawn
                assert found.right[method][row, -1] == pytest.approx(want)
            assert 0 <= found.right[method][row, -1] <= 1


def test_accuracy_at_n_is_the_mean_over_all_draws() -> None:
    rows = group("a", (RIGHT, -0.1, "1"), (RIGHT, -0.9, "1"), (WRONG, -0.3, "2"), (WRONG, -0.4, "2"), (WRONG, -1, "3"))
    many = [replace(item, question=f"{q}") for q in range(400) for item in rows]
    table = table_of(many)
    found = vote(table, table.logprob_sum / table.tokens, 5)
    for method in METHODS[:3]:
        for n in (2, 3):
            want = np.mean(
                [
                    expected_accuracy(
                        select_answer(
                            [rows[i].extracted for i in chosen],
                            [rows[i].logprob_sum / 4 for i in chosen],
                            list(chosen),
                            method,
                        ),
                        lambda item: item == "1",
                    )
                    for chosen in permutations(range(5), n)
                ]
            )
            assert found.right[method][:, n - 1].mean() == pytest.approx(want, abs=0.03), (method, n)


def test_pruning_of_many_at_once_is_close_to_that_of_each_alone() -> None:
    draw = np.random.default_rng(0)
    prob = np.where(draw.random((60, 16)) < 0.5, draw.beta(20, 4, (60, 16)), draw.beta(4, 8, (60, 16)))
    assert (keep_matrix(prob) == np.array([rpc_keep(row) for row in prob])).mean() > 0.85
    given = np.arange(16) < draw.integers(5, 17, size=60)[:, None]
    for row, part, keep in zip(prob, given, keep_matrix(prob, given), strict=True):
        alone = keep_matrix(row[part][None])[0]
        assert (keep[part] == alone).mean() > 0.8, "what is not given has no say"


def test_intervals_cover_the_value_and_pooled_numbers_have_them_too() -> None:
    draw = np.random.default_rng(1)
    rows = []
    for q in range(60):
        rows += group(
            f"{q}", *[(RIGHT if draw.random() < 0.6 else WRONG, -float(draw.random()), f"{n}") for n in range(4)]
        )
    found = only(rows, bootstrap=200)
    for name in ("accuracy", "auc_mean", "pc", "auc_pooled", "ece", "aurc", "precision@0.5"):
        low, high = found.intervals[name]
        assert low <= found.values[name] + 0.05 and high >= found.values[name] - 0.05 and low < high, name


# --- two models -------------------------------------------------------------------------------------------------------


def test_a_pair_has_p_values_and_the_questions_that_both_mixed() -> None:
    sharp = [replace(item, model="sharp", logprob_sum=item.logprob_sum / 2) for item in [*MIXED, *EASY, *HARD]]
    (found,) = pair(table_of([*MIXED, *EASY, *HARD, *sharp]))
    assert (found.first, found.second, found.questions, found.mixed_both) == ("base", "sharp", 3, 1)
    assert found.same_responses, "rescored: the same texts and verdicts"
    by_name = {each.name: each for each in found.differences}
    assert by_name["accuracy"].difference == 0 and by_name["accuracy"].p == 1
    assert by_name["auc_mean"].first == by_name["auc_mean"].second == 0.75
    other = [replace(item, response="other", model="other") for item in MIXED]
    (found,) = pair(table_of([*MIXED, *EASY, *other]), bootstrap=50)
    assert (found.questions, found.same_responses) == (1, False)
    with pytest.raises(DataError, match="did not rate the same responses"):
        pair(table_of([*MIXED, *other]), fixed_sample=True)
    with pytest.raises(DataError, match="no question in common"):
        pair(table_of([*EASY, *other]))


def test_sign_flips_are_exact_for_few_questions_and_agree_with_their_limit() -> None:
    assert sign_flip_p(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)
    for mean in (0.0, 0.05, 0.1):
        gain = np.random.default_rng(0).normal(mean, 1, 1_000)
        limit = sign_flip_p(np.append(gain, 0.0))  # one more entry, which changes nothing but the method
        assert sign_flip_p(gain) == pytest.approx(limit, abs=0.015)
    assert math.isnan(sign_flip_p(np.array([])))


def test_a_model_is_matched_with_the_step_at_which_the_other_was_as_accurate() -> None:
    def at(model: str, step: int, right: int) -> list[EvalRecord]:
        rows = group("a", *[(RIGHT, -0.1 * n, "1") for n in range(right)], *[(WRONG, -0.3, "2")] * (4 - right))
        return [replace(item, model=model, step=step) for item in rows]

    table = table_of([*at("grpo", 0, 1), *at("grpo", 10, 2), *at("grpo", 20, 3), *at("capo", 0, 1), *at("capo", 20, 2)])
    found = {(one.model, one.step): one for one in match_accuracy(table)}
    assert found["capo", 20].other_step == 10 and found["capo", 20].other_accuracy == 0.5
    assert found["capo", 20].paired == 0.0 and found["capo", 20].mixed_both == 1
    assert found["grpo", 20].other_step is None, "capo never was that accurate"


# --- the commands -----------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_metrics_are_printed_as_a_table_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_records(a, [*MIXED, *EASY, *HARD])
    write_records(b, [replace(item, model="tuned", step=7, response="x") for item in [*MIXED, *EASY, *HARD]])
    assert main(["metrics", str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| bench +\| +7 +\| tuned +\| +3 \|", re.sub(" +", " ", shown)) or "tuned" in shown
    assert "paired AUC" in shown and "1 of 3" in shown
    assert main(["metrics", str(a), "--format", "csv", "--output", str(tmp_path / "m.csv"), "--bootstrap", "20"]) == 0
    rows = {row["metric"]: row for row in lines_of(tmp_path / "m.csv") if not row["n"]}
    assert float(rows["accuracy"]["value"]) == 0.5 and rows["accuracy"]["low"]
    assert main(["metrics", str(a), str(b), "--format", "json", "--group-by", "model"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["group"] for one in found["groups"]] == [{"model": "base"}, {"model": "tuned"}]
    assert found["groups"][0]["values"]["auc_mean"] == 0.75
    assert found["pairs"][0]["first"] == "base"


def test_a_rule_answers_with_the_wanted_precision_and_says_where_it_holds(tmp_path: Path, capsys) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for q in range(200):
        means = -draw.random(4)
        rows += group(f"{q}", *[(RIGHT if draw.random() < np.exp(2 * mean) else WRONG, mean, "1") for mean in means])
    path, rule_path = tmp_path / "r.jsonl", tmp_path / "rule.json"
    write_records(path, rows)
    for method in ("threshold", "isotonic"):
        assert main(["calibrate", str(path), "--precision", "0.8", "--method", method, "--output", str(rule_path)]) == 0
        rule = read_rule(rule_path)
        assert rule == fit(read_table([path]), 0.8, method)
        assert rule.precision >= 0.8 and 0.05 < rule.coverage < 0.8 and rule.precision_low < rule.precision
        applied = apply(rule, read_table([path]))
        assert applied["answered"] == rule.coverage and applied["answered_precision"] == rule.precision
        assert (applied["unseen"], applied["out_of_range"]) == (0, 0)
        assert main(["metrics", str(path), "--abstain", str(rule_path)]) == 0
        assert "out of range" in capsys.readouterr().out
    assert applied["mapped_ece"] < 0.05
    moved = apply(rule, table_of([replace(item, step=9, logprob_sum=-99.0) for item in rows]))
    assert (moved["unseen"], moved["out_of_range"], moved["answered"]) == (1, 1, 0)
    assert math.isnan(moved["answered_precision"])


# --- files of others --------------------------------------------------------------------------------------------------


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_dumps_of_verl_are_read(tmp_path: Path) -> None:
    row = {
        "input": "user\n1+1?\nassistant\n",
        "output": "2",
        "gts": "2",
        "score": 1.0,
        "step": 5,
        "acc": True,
        "pred": "2",
    }
    wrong = row | {"output": "3", "score": -1.0, "acc": False, "pred": "[INVALID]"}
    path = write_lines(
        tmp_path / "my-run" / "5.jsonl", [row, wrong, row | {"input": "other"}, row | {"input": "other"}]
    )
    (found,) = measure(read_table([path]))
    assert found.group == {"benchmark": "verl", "step": 5, "model": "my-run"}
    assert found.values["accuracy"] == 0.75 and found.values["questions"] == 2
    assert found.values["sc"] == 1.0
    assert math.isnan(found.values["auc_mean"]) and "pc" not in found.values, "it dumps no log-probs"
    assert math.isnan(found.values["tokens"]), "nor lengths"
    plain = [{"input": "a", "output": "x", "gts": "1", "score": score, "step": 1} for score in (1.0, 0.0, -1.0, 0.1)]
    (found,) = measure(read_table([write_lines(tmp_path / "plain" / "1.jsonl", plain)]))
    assert found.values["accuracy"] == 0.25 and "sc" not in found.values


def test_sample_logs_of_lm_evaluation_harness_are_read(tmp_path: Path) -> None:
    row = {
        "doc_id": 3,
        "doc": {"question": "1+1?"},
        "target": "#### 2",
        "arguments": {"gen_args_0": {"arg_0": "Question: 1+1?", "arg_1": {"until": []}}},
        "resps": [["It is 2. #### 2"]],
        "filtered_resps": ["2"],
        "filter": "strict-match",
        "metrics": ["exact_match"],
        "doc_hash": "a",
        "exact_match": 1.0,
    }
    loose = row | {"filter": "none", "filtered_resps": ["[invalid]"], "exact_match": 0.0}
    paths = [
        write_lines(tmp_path / "org__model" / f"samples_gsm8k_2026-01-0{day}T00-00-00.1.jsonl", [row, loose])
        for day in (1, 2)
    ]
    found = {one.group["benchmark"]: one for one in measure(read_table(paths))}
    assert set(found) == {"gsm8k/strict-match", "gsm8k"}
    strict = found["gsm8k/strict-match"]
    assert strict.group["model"] == "org__model"
    assert (strict.values["accuracy"], strict.values["samples"]) == (1.0, 2), "two runs are two samples"
    choices = [
        row
        | {
            "resps": [[["-1.0", "True"]], [["-3.0", "False"]]],
            "filtered_resps": [["-1.0", "True"], ["-3.0", "False"]],
            "filter": "none",
            "metrics": ["acc", "acc_norm"],
            "acc": 1.0,
        }
    ]
    path = write_lines(tmp_path / "m" / "samples_arc_easy_2026-01-01T00-00-00.jsonl", choices)
    table = read_table([path])
    assert table.names["benchmark"] == ("arc_easy",)
    assert table.stated.tolist() == pytest.approx([1 / (1 + math.exp(-2))])
    broken = write_lines(tmp_path / "m" / "samples_x_1.jsonl", [row | {"filtered_resps": []}])
    with pytest.raises(DataError, match="row 1: resps and filtered_resps are not as"):
        read_table([broken])


# --- bad records ------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a command that ends with 2 and writes nothing else."""
    assert main([str(word) for word in arguments]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1, said
    return said.err


def test_missing_and_nan_log_probs_leave_the_calibration_but_not_the_accuracy(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = [to_line(item) for item in MIXED]
    lines[1] = lines[1].replace('"logprob_sum": -2.0', '"logprob_sum": NaN')
    lines[3] = lines[3].replace('"logprob_sum": -3.6', '"logprob_sum": null')
    path.write_text("\n".join(lines) + "\n")
    (found,) = measure(read_table([path]))
    assert (found.values["accuracy"], found.values["scored"], found.values["auc_mean"]) == (0.5, 0.5, 1.0)
    none = only([replace(item, logprob_sum=math.nan) for item in MIXED])
    assert math.isnan(none.values["auc_mean"]) and none.values["scored"] == 0 and none.values["accuracy"] == 0.5
    assert "pc" not in none.values and none.values["sc"] == 1.0


def test_questions_with_different_numbers_of_samples_weigh_the_same() -> None:
    found = only([*MIXED, *EASY[:2]])
    assert found.values["accuracy"] == 0.75
    assert (found.values["samples"], found.values["samples_most"]) == (2, 4)
    assert len(found.by_samples["sc"]) == 2, "every N up to the fewest"
    assert found.values["pass_at_k"] == pytest.approx((1 - 1 / 6 + 1) / 2)


def test_a_benchmark_without_a_mixed_question_is_undefined_not_zero(tmp_path: Path, capsys) -> None:
    path = tmp_path / "r.jsonl"
    write_records(path, EASY)
    assert main(["metrics", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "0 of 1" in shown and "undefined" in shown
    assert main(["metrics", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["values"]["auc_mean"] is None
    nobody = only(group("q", (UNPARSEABLE, -0.1, "1")))
    assert nobody.values["questions"] == 0 and nobody.values["unparseable"] == 1


def test_samples_that_occur_twice_are_refused_unless_model_or_step_differ(tmp_path: Path, capsys) -> None:
    path = tmp_path / "r.jsonl"
    write_records(path, MIXED)
    line = refused(capsys, "metrics", path, path)
    assert "question 'mixed' of 'bench' has sample 0 twice, both of 'base' at step 0" in line
    twins = [*MIXED, *[replace(item, step=1) for item in MIXED], *[replace(item, model="b") for item in MIXED]]
    assert len(measure(table_of(twins))) == 3
    assert measure(table_of(twins), ["benchmark"])[0].values["questions"] == 3, "pooled, not merged"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"r\.jsonl: no records in it"),
        ('{"question": "q"}\n', r"r\.jsonl: record 1: 'benchmark' is missing"),
        ("[1]\n", r"r\.jsonl:1: not a JSON object"),
        (to_line(MIXED[0]).replace('"schema": 2', '"schema": 9'), r"record 1: schema 9, expected 1 or 2"),
        (to_line(MIXED[0]).replace('"correct": true', '"correct": "yes"'), r"record 1: correct='yes', expected bool"),
        (to_line(MIXED[0]).replace('"correct": true', '"correct": false'), r"record 1: correct=False: does not agree"),
        (to_line(MIXED[0]).replace('"tokens": 4', '"tokens": -4'), r"record 1: tokens=-4: below 0"),
        (
            to_line(MIXED[0]).replace('"logprob_sum": -', '"logprob_sum": '),
            r"logprob_sum=0\.4: log-probs are at most 0",
        ),
        (
            to_line(MIXED[0]).replace('"verdict": "correct"', '"verdict": "good"'),
            r"record 1: verdict: not one of correct",
        ),
        (f"{to_line(MIXED[0])}\n" * 2, r"has sample 0 twice"),
        ('{"input": "a", "output": "b", "score": "?", "step": 1}\n', r"row 1: score='\?', expected a number"),
    ],
)
def test_bad_files_end_with_one_line(tmp_path: Path, capsys, text: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    line = refused(capsys, "metrics", path)
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["metrics", "absent.jsonl"], r"absent\.jsonl: cannot be read: No such file"),
        (["metrics", "r.jsonl", "--group-by", "models"], r"group by models: choose among benchmark, step, model"),
        (["metrics", "r.jsonl", "--confidence", "entropy"], r"confidence 'entropy': unknown\. Choose perplexity, sum"),
        (["metrics", "r.jsonl", "--confidence", "stated"], r"confidence stated: no record holds what it needs"),
        (["metrics", "r.jsonl", "--confidence", "lowest-8"], r"confidence lowest-8: no record holds what it needs"),
        (["metrics", "r.jsonl", "--base", "other"], r"base 'other': no such model\. There are: base"),
        (["metrics", "r.jsonl", "--abstain", "r.jsonl"], r"r\.jsonl: not JSON"),
        (["metrics", "r.jsonl", "--output", "."], r"--output \.: is a folder"),
        (
            ["calibrate", "r.jsonl", "--precision", "0.99", "--output", "x"],
            r"precision 0\.99 is never reached .* 0\.\d+ at",
        ),
        (
            ["calibrate", "r.jsonl", "--precision", "2", "--output", "x"],
            r"precision=2\.0: must be above 0 and at most 1",
        ),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, capsys, monkeypatch, options: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "r.jsonl", group("a", (WRONG, -0.1, "2"), (RIGHT, -0.2, "1"), (WRONG, -0.3, "2")))
    line = refused(capsys, *options)
    assert re.search(message, line), line
    assert not (tmp_path / "x").exists()


def test_what_the_fast_parser_refuses_is_read_slowly_and_alike(tmp_path: Path) -> None:
    rows = [*MIXED, *EASY]
    plain, odd = tmp_path / "plain.jsonl", tmp_path / "odd.jsonl"
    write_records(plain, rows)
    write_records(odd, [replace(rows[0], prompt="\ud800"), *rows[1:]])
    odd.write_text(odd.read_text() + '\n{"question": "torn')
    for name in ("question", "correct", "logprob_sum", "answer", "completion", "tokens", "step"):
        np.testing.assert_array_equal(getattr(read_table([plain]), name), getattr(read_table([odd]), name), name)
        np.testing.assert_array_equal(getattr(read_table([plain]), name), getattr(table_of(rows), name), name)


def test_records_are_measured_without_torch() -> None:
    """Which takes longer to import than a hundred thousand records to measure."""
    program = (
        "import sys; from capo_megatron.cli import evaluation;"
        "from capo_megatron.evaluation import abstention, metrics, paired, table, tables; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("step", ["Infinity", "NaN", "9" * 23, "[" * 100_000])
def test_a_foreign_row_with_an_impossible_number_is_one_line(
    step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "5.jsonl"
    file.write_text(
        '{"input": "q", "output": "a", "score": 1.0, "step": 1}\n'
        f'{{"input": "q", "output": "a", "score": 1.0, "step": {step}}}\n'
    )
    assert main(["metrics", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("change", [{"threshold": math.nan}, {"lowest_score": "x"}, {"knots": [[0.2, 1], [0.1, 0]]}])
def test_a_rule_that_was_changed_by_hand_is_checked(change: dict[str, Any], tmp_path: Path) -> None:
    rule = tmp_path / "rule.json"
    write_rule(rule, fit(table_of([*MIXED, *EASY, *HARD]), 0.5))
    rule.write_text(json.dumps(json.loads(rule.read_text()) | change))
    with pytest.raises(DataError, match="not a rule of capo-megatron calibrate"):
        read_rule(rule)


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    write_records(tmp_path / "r.jsonl", MIXED)
    command = f"{sys.executable} -m capo_megatron metrics {tmp_path / 'r.jsonl'}"
    done = subprocess.run(["sh", "-c", f"{command} | true"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
