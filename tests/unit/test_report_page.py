"""The report: what it says, what it keeps out of the markup, and what it does with half a run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import math
import re
import shutil
import time
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from capo_megatron.errors import CapoError, DataError
from capo_megatron.evaluation.records import write_records
from capo_megatron.evaluation.report import write_report
from capo_megatron.evaluation.report.samples import Samples
from capo_megatron.runlog import to_json
from capo_megatron.types import EvalRecord

ASSETS = files("capo_megatron.evaluation.report") / "assets"
EVIL = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)><!--",
    "]]> &lt;b&gt; \"'`${x}",
    r"$\frac{1}{$ and \begin{align} x",
    "NUL \x00, escape \x1b[31m, half \ud83d a character, \u202e turned",
    "\u2028 \ufeff \U0001f600 \xa0",
    "",
)


def record(question: int, sample: int, right: bool, logprob: float = -1.0, **changed: Any) -> EvalRecord:
    found = EvalRecord(
        question=f"q{question}",
        benchmark="bench",
        sample=sample,
        prompt=f"Solve number {question}",
        response=f"It is {right}.",
        extracted=str(right),
        answer="True",
        correct=right,
        verdict="correct" if right else "wrong",
        tokens=10,
        logprob_sum=10 * logprob,
        truncated=False,
        model="capo",
        step=20,
    )
    return replace(found, **changed)


def evaluated(right: Sequence[int], ranked: float, **changed: Any) -> list[EvalRecord]:
    """A question per entry of `right`, of whose 8 samples so many are right; these are the more confident in a share
    `ranked` of the questions, and the less confident in the others."""
    found = []
    for question, count in enumerate(right):
        best = 1 if question % 100 < 100 * ranked else -1
        for sample in range(8):
            better = best if sample < count else -best
            found.append(record(question, sample, sample < count, -1.0 + 0.5 * better - 0.01 * sample, **changed))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with everything in it."""
    folder = tmp_path / "capo"
    (folder / "eval").mkdir(parents=True)
    (folder / "samples").mkdir()
    (folder / "resolved.yaml").write_text("algorithm: {kind: capo, tau: 0.4}\ntrain: {steps: 20}\noutput: /a/secret\n")
    (folder / "versions.json").write_text('{"python": "3.11", "packages": {"torch": "2.13"}, "git": null}')
    rows = [
        {
            "step": step,
            "reward/mean": 0.5,
            "validation/accuracy": 0.5 + step / 100,
            "validation/accuracy_se": 0.01,
            "validation/auc_mean": 0.8 - step / 200,
            "validation/auc_mean_se": 0.01,
            "validation/auc_questions": 90.0,
            "mask/dropped_wrong": 0.2,
            "seconds/train": 2.0,
            "seconds/step": 3.0,
            "tokens_per_second/train": 1e4,
        }
        for step in range(21)
    ]
    (folder / "metrics.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))
    write_records(folder / "eval" / "base.jsonl", evaluated([4] * 100, 0.9, model="base", step=0))
    write_records(folder / "eval" / "step_000020.jsonl", evaluated([6] * 100, 0.7))
    sample = {"problem": "p", "sample": 0, "verdict": "wrong", "mean_logprob": -0.5, "tokens": 3, "truncated": True}
    sample |= {"extracted": None, "answer": "1", "prompt": "1?", "response": "two"}
    (folder / "samples" / "step_000007.jsonl").write_text(to_json(sample) + "\n")
    return folder


class Page(HTMLParser):
    """A page as a browser takes it apart."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.markup = path.read_bytes()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._inside = ""
        self.feed(self.markup.decode("utf-8"))
        self.data = {kept["id"]: text for kept, text in self.scripts if kept.get("type") == "text/plain"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._inside != "style":
            self.words += data

    def unpack(self, name: str) -> bytes:
        return gzip.decompress(base64.b64decode(self.data[name]))

    def json(self, name: str) -> Any:
        return json.loads(self.unpack(name))

    def column(self, name: str, code: str) -> list[Any]:
        return array(code, self.unpack(f"column-{name}")).tolist()

    def texts(self, name: str) -> Iterator[list[str | None]]:
        for number in range(len(self.json("index")[f"{name}s"])):
            yield from self.json(f"{name}{number}")


def report(path: Path, *runs: Path, **options: Any) -> Page:
    return Page(write_report(runs, path / "out" / "report.html", **options))


# --- what a model wrote -----------------------------------------------------------------------------------------------


def test_every_text_comes_out_as_it_went_in(tmp_path: Path) -> None:
    texts = [*EVIL, "x" * 3_000_000, "é" * 200_000]
    records = [
        record(n, n, n % 2 == 0, response=text, prompt=text, answer=text, extracted=text if n % 3 else None)
        for n, text in enumerate(texts)
    ]
    write_records(tmp_path / "some.jsonl", records)
    page = report(tmp_path, tmp_path / "some.jsonl")
    # Half a character is an escape in JSON, on the way here as well as in the page.
    assert list(page.texts("response")) == [[r.response, r.extracted] for r in records]
    assert list(page.texts("prompt")) == [[r.prompt, r.answer] for r in records]
    assert page.column("tokens", "I") == [10] * len(records)
    assert page.column("logprob", "f") == [-1.0] * len(records)
    assert page.column("verdict", "B") == [n % 2 for n in range(len(records))]
    assert page.column("sample", "I") == list(range(len(records)))
    assert page.column("question", "I") == list(range(len(records)))


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    for number, evil in enumerate(EVIL):
        records = [
            replace(record(0, s, s < 4, response=evil, prompt=evil, model=evil), benchmark=f"{evil}{q}", question=evil)
            for q in range(2)
            for s in range(8)
        ]
        folder = tmp_path / f"run-{number}" / "<img src=x onerror=alert(1)>"
        (folder / "eval").mkdir(parents=True)
        write_records(folder / "eval" / "x.jsonl", records)
        (folder / "resolved.yaml").write_text(json.dumps({"data": {"prompt": evil}, evil: 1}))
        (folder / "versions.json").write_text(json.dumps({"command": evil}))
        page = report(tmp_path / f"run-{number}", folder)
        assert {tag for tag, _ in page.tags}.isdisjoint({"img", "iframe", "object", "b", "base"})
        assert not any(name.startswith("on") for _, kept in page.tags for name in kept)
        assert sum(tag == "script" for tag, _ in page.tags) == 2 + len(page.data)
        assert "<img src=x onerror=alert(1)>" in page.words  # the name of the run, as text
        if evil.startswith("<script>"):
            assert f"{evil}0" in page.words  # the benchmark's
        assert b"\x00" not in page.markup and b"\x1b" not in page.markup


def test_only_the_page_s_own_scripts_may_run_and_nothing_may_be_fetched(run: Path, tmp_path: Path) -> None:
    page = report(tmp_path, run)
    policy = next(kept["content"] for tag, kept in page.tags if kept.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    code = [text.encode() for kept, text in page.scripts if "type" not in kept] + [page.unpack("katex")]
    assert {base64.b64encode(hashlib.sha256(text).digest()).decode() for text in code} == allowed
    assert not [kept for tag, kept in page.tags if "src" in kept or (kept.get("href") or "#")[0] not in "#d"]
    assert b"http://" not in page.markup.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in page.markup


def test_katex_is_the_release_that_its_notice_names() -> None:
    notice = (ASSETS / "katex" / "NOTICE").read_text()
    for name in ("katex.min.js", "auto-render.min.js"):
        content = (ASSETS / "katex" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() in notice
    assert "KaTeX 0.19.1" in notice and b'version:"0.19.1"' in (ASSETS / "katex" / "katex.min.js").read_bytes()
    assert "MIT" in (ASSETS / "katex" / "LICENSE").read_text()


# --- what it says -----------------------------------------------------------------------------------------------------


def test_accuracy_that_rises_while_auc_falls_is_warned_of(run: Path, tmp_path: Path) -> None:
    words = report(tmp_path, run).words
    assert "More accurate, but worse calibrated" in words
    assert "Accuracy rose: 50.0 % to 75.0 % on 100 questions." in words
    assert "less often: 90.0 % to 70.0 % of all pairs" in words
    assert "Warning: paired AUC falls while accuracy rises" in words
    assert "50.0 %→75.0 %+25.0 points (+25.0 to +25.0)" in words


def test_better_on_both_and_no_change(run: Path, tmp_path: Path) -> None:
    write_records(run / "eval" / "step_000020.jsonl", evaluated([6] * 100, 1.0))
    assert "More accurate, and better calibrated" in report(tmp_path, run).words
    write_records(run / "eval" / "step_000020.jsonl", evaluated([4] * 100, 0.9))
    assert "No measurable change" in report(tmp_path, run).words


def test_a_composition_effect_is_told_from_a_loss_of_calibration(run: Path, tmp_path: Path) -> None:
    """Most questions, which are ranked well, are all right in the end; those that stay mixed are ranked as before."""
    write_records(run / "eval" / "step_000020.jsonl", evaluated([8] * 60 + [4] * 40, 0.9))
    words = report(tmp_path, run).words
    assert "AUC-mean falls (0.900 to 0.750) while paired AUC does not: a composition effect." in words
    assert "More accurate, and as calibrated as before" in words
    assert "Paired AUC rests on 40 questions only." in words


def test_cautions(run: Path, tmp_path: Path) -> None:
    late = [replace(one, truncated=one.sample == 0) for one in evaluated([6] * 99, 0.7)]
    late += [record(99, 0, False, verdict="timeout"), *(record(99, n, True, math.nan) for n in range(1, 8))]
    write_records(run / "eval" / "step_000020.jsonl", late)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"policy/entropy": 1.0 - row["step"] / 20.5, "engine/gap_p99": 3.0, "train/skipped": 1.0}
    (run / "metrics.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))
    words = report(tmp_path, run).words
    assert "12.4 % of the responses were cut off at the length limit." in words
    assert "have no log-prob and no place in any AUC" in words
    assert "Entropy fell from 1 to 0.0244" in words
    assert "exp |gap| reached 3" in words
    assert "21 optimizer steps were skipped" in words


def test_runs_are_compared_with_a_base_they_share_and_with_each_other(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "grpo"
    shutil.copytree(run, other)
    (other / "resolved.yaml").write_text("algorithm: {kind: grpo}\ntrain: {steps: 20}\noutput: /b\n")
    write_records(other / "eval" / "step_000020.jsonl", evaluated([7] * 100, 0.5, model="grpo"))
    page = report(tmp_path, run, other)
    charts = page.json("charts")
    assert [one["name"] for one in charts["evaluations"]] == ["base", "capo", "grpo"]
    assert [one["colour"] for one in charts["evaluations"]] == ["base", 0, 1]
    assert "grpo against capo: +12.5 points of accuracy" in page.words
    assert page.words.count("algorithm.tau") == 2  # among the differences, and the settings of one
    assert page.words.count("/a/secret") == 1  # where the output is differs always


def test_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    for seed in ("seed_0", "seed_1"):
        shutil.copytree(run, tmp_path / seed / "capo")
    page = report(tmp_path, tmp_path / "seed_0" / "capo", tmp_path / "seed_1" / "capo")
    assert "seed_0/capo" in page.words and "seed_1/capo" in page.words


def test_curves_and_times(run: Path, tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": float(step % 2), "seconds/step": 2.0} for step in range(4000)]
    (run / "metrics.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))
    charts = report(tmp_path, run).json("charts")
    (line,) = next(chart["lines"] for chart in charts["curves"] if chart["title"] == "Reward")
    assert len(line["x"]) == 400 and set(line["y"]) == {0.5}
    assert set(line["low"]) == {0.0} and set(line["high"]) == {1.0}
    assert charts["timings"][0]["seconds"] == {"other": 8000.0}


def test_reliability_and_histogram_count_every_response_once(run: Path, tmp_path: Path) -> None:
    for one in report(tmp_path, run).json("charts")["evaluations"]:
        assert sum(row[2] for row in one["reliability"]) == pytest.approx(1, abs=1e-4)
        weighted = sum(accuracy * share for _, accuracy, share in one["reliability"])
        assert weighted == pytest.approx(one["accuracy"], abs=1e-3)
        assert sum(one["histogram"]["right"]) == pytest.approx(1, abs=1e-3)
        assert sum(one["histogram"]["wrong"]) == pytest.approx(1, abs=1e-3)
        assert one["coverage"]["y"][-1] == pytest.approx(one["accuracy"], abs=1e-4)


# --- half a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("eval", "No evaluation records"),
        ("samples", "No training samples"),
        ("metrics.jsonl", "No training curves"),
        ("resolved.yaml", "resolved.yaml cannot be read (No such file or directory)"),
        ("versions.json", "versions.json cannot be read (No such file or directory)"),
    ],
)
def test_what_is_missing_is_said(run: Path, tmp_path: Path, gone: str, said: str) -> None:
    assert "What is missing" not in report(tmp_path, run).words
    (shutil.rmtree if (run / gone).is_dir() else Path.unlink)(run / gone)
    page = report(tmp_path, run)
    assert said in page.words
    assert page.json("index")["rows"] > 0


def test_without_records_validation_is_judged(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "eval")
    words = report(tmp_path, run).words
    assert "More accurate, but worse calibrated" in words
    assert "From validation during training alone" in words


def test_an_interrupted_run_and_its_torn_line(run: Path, tmp_path: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:13]) + '\n{"step": 13, "rew')
    shutil.rmtree(run / "eval")
    assert "The run has stopped, or is still going, at step 12 of 20." in report(tmp_path, run).words


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = tmp_path / "begun"
    folder.mkdir()
    (folder / "resolved.yaml").write_text("train: {steps: 3}\n")
    page = report(tmp_path, folder)
    assert "Not evaluated" in page.words and page.json("index")["rows"] == 0


def test_damaged_parts_of_a_run_are_left_out(run: Path, tmp_path: Path) -> None:
    (run / "eval" / "step_000010.jsonl").write_text('{"question": "q"}\n')
    (run / "eval" / "empty.jsonl").write_text("")
    (run / "metrics.jsonl").write_text("not json\n{}\n")
    (run / "samples" / "step_000007.jsonl").write_text("[1]\n\n")
    (run / "resolved.yaml").write_text("a: [1\n")
    words = report(tmp_path, run).words
    assert "step_000010.jsonl left out: record 1: 'benchmark' is missing" in words
    assert "empty.jsonl left out: no records in it" in words
    assert "No training curves: metrics.jsonl" in words
    assert "resolved.yaml cannot be read" in words
    assert str(tmp_path) not in words  # the reader of a page has no use for our folders
    assert "More accurate" in words


def test_models_that_answered_other_questions_are_not_compared(run: Path, tmp_path: Path) -> None:
    write_records(run / "eval" / "step_000020.jsonl", evaluated([6] * 10, 0.7, benchmark="other"))
    assert "It answered other questions than base: nothing can be compared." in report(tmp_path, run).words


def test_records_without_log_probs_or_without_verdicts(tmp_path: Path) -> None:
    for name, changed in (("a", {"logprob_sum": math.nan}), ("b", {"verdict": "unparseable"}), ("c", {"tokens": 0})):
        write_records(tmp_path / f"{name}.jsonl", [replace(one, **changed) for one in evaluated([4] * 3, 1.0)])
    page = report(tmp_path, *(tmp_path / f"{name}.jsonl" for name in "abc"))
    assert "undefined" in page.words and "Not compared" in page.words


@pytest.mark.parametrize("make", ["nothing", "empty folder", "twice", "bad file", "none"])
def test_bad_input_is_one_line(tmp_path: Path, run: Path, make: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    paths = {
        "nothing": [tmp_path / "nothing"],
        "empty folder": [tmp_path / "empty"],
        "twice": [run, run / "eval" / ".."],
        "bad file": [tmp_path / "bad.jsonl"],
        "none": [],
    }[make]
    target = tmp_path / "new" / "report.html"
    with pytest.raises(DataError) as caught:
        write_report(paths, target)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert not target.exists()


def test_a_bad_destination_is_one_line(tmp_path: Path, run: Path) -> None:
    with pytest.raises(CapoError, match=r"is a folder or a device\. Name a file"):
        write_report([run], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CapoError, match="a file is in the way"):
        write_report([run], tmp_path / "file" / "report.html")
    with pytest.raises(CapoError, match="must be 1 or more"):
        write_report([run], tmp_path / "report.html", samples=0)


# --- many responses ---------------------------------------------------------------------------------------------------


def test_some_samples_are_whole_questions(run: Path, tmp_path: Path) -> None:
    page = report(tmp_path, run, samples=100)
    index = page.json("index")
    assert [(one["kept"], one["total"]) for one in index["sources"]] == [(96, 800), (96, 800), (1, 1)]
    questions = page.column("question", "I")
    assert {questions.count(number) for number in questions[:-1]} == {16}  # 8 of each model
    assert "50.0 %" in page.words  # the numbers are of all


def test_texts_do_not_pile_up_in_memory() -> None:
    records = [record(n // 16, n % 16, True, response=f"{n} " + "word " * 1000) for n in range(4000)]  # 20 MB
    tracemalloc.start()
    try:
        spool = io.BytesIO()
        Samples(spool).add("some", records)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6e6 + len(spool.getvalue())


def test_many_responses_are_written_in_a_moment(tmp_path: Path) -> None:
    """tests/bench/report.py measures 100,000."""
    many = [
        record(n // 16, n % 16, n % 3 == 0, -1 - n % 7, response=f"Because {n} " + "$x^2$ so " * 50)
        for n in range(10_000)
    ]
    write_records(tmp_path / "many.jsonl", many)
    began = time.process_time()
    page = write_report([tmp_path / "many.jsonl"], tmp_path / "report.html")
    assert time.process_time() - began < 15
    assert page.stat().st_size < 2e6
