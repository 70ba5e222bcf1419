"""Rewards: what counts as the same answer, and that no response can hang, crash or mislead the grading."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from capo_megatron.answers import boxed_answer
from capo_megatron.config import RewardConfig
from capo_megatron.errors import ConfigError, RewardError
from capo_megatron.rewards import build_reward, maths, scorers
from capo_megatron.rewards.functions import grade_exact, grade_task
from capo_megatron.seams import RewardFunction
from capo_megatron.types import Problem, Verdict

# Integer arithmetic that runs for ages in C, where no Python signal handler gets a turn.
HANGS = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}"
EXHAUSTS_MEMORY = r"(x+y)^{100000000}"
START_S = 60.0  # slack for starting processes on a machine that is busy with other tests


def problem(answer: str, **extra: object) -> Problem:
    return Problem(id="p", prompt="", prompt_ids=(), answer=answer, extra=extra)


def boxed(answer: str) -> str:
    return f"so the answer is $\\boxed{{{answer}}}$."


# --- when two answers are the same ---------------------------------------------------------------------------------

SAME = [
    (r"\{1,2,3\}", "1, 2, 3"),
    ("x<3", r"(-\infty,3)"),
    (r"(-\infty,3)", "x<3"),
    (r"90^\circ", "90"),
    ("3.141593", r"\pi"),
    ("B", r"\textbf{(B)}\ 12"),
    ("A", "A"),
    (r"\text{(C)}", "C"),
    (r"2\frac{1}{2}", "2.5"),
    ("1000", "1,000"),
    (r"10{,}000", "10000"),
    ("18", r"\$18.00"),
    (r"\pm 2", "2,-2"),
    ("4", "2+2"),
    ("12", r"2^2\cdot 3"),
    ("025", "25"),
    ("27.0", "27"),
    (r"10\%", "10"),
    (r"10\%", "0.1"),
    ("10", r"10\%"),
    ("(1,2)", "1,2"),
    ("101", "101_2"),
    ("(101)_2", "101_{2}"),
    ("12:00", "12:00"),
    (r"1, 2, \ldots, n", r"1,2,\ldots,n"),
    (r"1 - \frac{1}{\mathrm{e}}", r"1-\frac1e"),
    ("5", r"5\text{ cm}"),
    ("5 cm", "5"),
    ("a + b + c", "c+b+a"),
    ("y=1/x", "xy=1"),
    ("x^2+1=0", "2x^2+2=0"),
    ("x=5", "5"),
    (r"\frac13", "0.333333"),
    (r"6.63 \times 10^{-34}", "6.63e-34"),
    ("0", r"\sin^2 1+\cos^2 1-1"),
    (r"\boxed{5}", "5"),
    ("$5$", "5"),
    (r"7\text{ hours}.", "7"),
    (r"\dfrac{1}{29,\!322,\!216}", r"\frac{1}{29322216}"),
]
DIFFERENT = [
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),
    (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"),
    ("4", r"4\sqrt(2)"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    ("12:00", "1:00"),
    ("101_2", "101"),
    ("101_2", "101_3"),
    (r"10\%", "100"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", "(2,1)"),
    ("7", "5,7"),
    ("7", r"7 \text{ or } 8"),
    (r"\frac{\pi}{2}", r"90^\circ"),
    ("3.14", r"\pi"),
    ("0", ""),
    ("x^2+1=0", "x^2+2=0"),
    (r"6.63 \times 10^{-34}", r"1.6 \times 10^{-19}"),
    ("0.0000001", "0.0000002"),
    ("3t", "3"),
    ("2ab", "2"),
    ("C", "A"),
    ("6", r"\frac{\partial"),
    ("3", "{" * 40 + "3" + "}" * 40),
]
MISSED = [  # equal, and known not to be recognised
    (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}"),
    (r"(-\infty,-1)\cup(1,\infty)", r"x<-1 \text{ or } x>1"),
    ("i", r"\sqrt{-1}"),
    (r"\frac13", "0.333..."),
]


@pytest.mark.parametrize(("reference", "answer"), SAME)
def test_equal_answers_are_correct(reference: str, answer: str) -> None:
    assert maths.verdict(reference, answer) == maths.CORRECT


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT + MISSED)
def test_other_answers_are_wrong(reference: str, answer: str) -> None:
    assert maths.verdict(reference, answer) == maths.WRONG


@pytest.mark.parametrize("answer", ["5", "", None, r"\frac{"])
@pytest.mark.parametrize("reference", ["", "  ", r"\frac{\partial", "E_{1},E_{2}"])
def test_a_reference_that_cannot_be_read_makes_nobody_wrong(reference: str, answer: str | None) -> None:
    assert maths.verdict(reference, answer) == maths.UNPARSEABLE


def test_the_workers_verdicts_are_those_of_the_types() -> None:
    assert {maths.CORRECT, maths.WRONG, maths.UNPARSEABLE} == {verdict.value for verdict in Verdict} - {"timeout"}


# --- the answer in a response --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("no box", None),
        (r"\boxed{3} but maybe \boxed{4}", "4"),
        (r"\boxed{7} \boxed{8}", "7, 8"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1, 2, 3"),
        (r"$\boxed{7}$ $\boxed{7}$", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x \right.}", r"\left\{x \right."),
        (r"\fbox{5}", "5"),
        (r"\boxed{3} and then \boxed{0", "3"),
        (r"\boxed{ open \boxed{4}", "4"),
        (r"\boxed{x = \boxed{4}}", r"x = \boxed{4}"),
        (r"\boxed{}", ""),
        ("}}}{{{\\boxed{1}", "1"),
    ],
)
def test_the_last_balanced_box_is_the_answer(response: str, answer: str | None) -> None:
    assert boxed_answer(response) == answer


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "}", r"\boxed{1}", r"\boxed{{}", "\\", "x", r"\boxed{1}, "])
def test_extraction_is_linear_in_a_megabyte_of_anything(piece: str) -> None:
    start = time.process_time()
    boxed_answer(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 5.0  # about 0.5 s at most; quadratic time would be hours


# --- grading in processes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def math_verify() -> Iterator[RewardFunction]:
    reward = build_reward(RewardConfig(timeout_s=3.0, memory_mib=256))
    yield reward
    reward.close()


def test_verdicts_rewards_and_extracted_answers(math_verify: RewardFunction) -> None:
    pairs = [("12", boxed(r"2^2\cdot 3")), ("12", boxed("13")), ("12", "twelve"), ("", boxed("12")), ("", "twelve")]
    grades = math_verify.grade([problem(answer) for answer, _ in pairs], [response for _, response in pairs])
    assert [grade.verdict.value for grade in grades] == ["correct", "wrong", "wrong", "unparseable", "unparseable"]
    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [grade.extracted for grade in grades] == [r"2^2\cdot 3", "13", None, "12", None]


def test_no_text_raises(math_verify: RewardFunction) -> None:
    texts = ["", "\0", "\ud800", boxed("\0"), boxed("\ud800"), boxed("\ud83d"), "x" * 1_000_000, "\\boxed{" * 100_000]
    texts += [boxed("9" * 1_000_000), boxed("{" * 500), boxed("\\" * 999), boxed(r"\frac\frac"), boxed("=" * 50)]
    grades = math_verify.grade([problem("7")] * len(texts), texts)
    assert {grade.verdict for grade in grades} == {Verdict.WRONG}
    assert max(len(grade.extracted or "") for grade in grades) <= RewardConfig().max_answer_chars


def test_only_the_hanging_answers_time_out_and_grading_goes_on(math_verify: RewardFunction) -> None:
    answers = ["1", HANGS, "2", HANGS + "+1", "1.0"]
    start = time.monotonic()
    grades = math_verify.grade([problem("1")] * 5, [boxed(answer) for answer in answers])
    assert [grade.verdict.value for grade in grades] == ["correct", "timeout", "wrong", "timeout", "correct"]
    assert time.monotonic() - start < 3.0 + START_S
    assert math_verify.grade([problem("1")], [boxed("1.00")])[0].verdict is Verdict.CORRECT


def test_grading_works_off_the_main_thread(math_verify: RewardFunction) -> None:
    grades: list[Verdict] = []
    answers = [boxed("3.0"), boxed(HANGS)]

    def grade() -> None:
        grades.extend(grade.verdict for grade in math_verify.grade([problem("3")] * 2, answers))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join(timeout=START_S)
    assert grades == [Verdict.CORRECT, Verdict.TIMEOUT]
    # The processes that replaced the killed one must outlive the thread that started them.
    assert math_verify.grade([problem("3")], [boxed("3.00")])[0].verdict is Verdict.CORRECT


def test_exhausted_memory_is_no_verdict_on_the_answer_although_sympy_hides_it() -> None:
    reward = build_reward(RewardConfig(timeout_s=100.0, memory_mib=128, workers=1))
    start = time.monotonic()
    verdicts = [grade.verdict for grade in reward.grade([problem("1")] * 2, [boxed(EXHAUSTS_MEMORY), boxed("1.0")])]
    reward.close()
    assert verdicts == [Verdict.TIMEOUT, Verdict.CORRECT]
    assert time.monotonic() - start < 90.0  # it was not the time limit


def test_a_graded_pair_is_remembered_and_a_timeout_is_not() -> None:
    reward = build_reward(RewardConfig(timeout_s=1.0, workers=1))
    assert reward.grade([problem("4")] * 2, [boxed("2+2"), boxed(HANGS)])[1].verdict is Verdict.TIMEOUT
    reward.close()
    assert reward.grade([problem("4")], [boxed("2+2")])[0].verdict is Verdict.CORRECT
    with pytest.raises(RewardError, match="closed"):
        reward.grade([problem("4")], [boxed(HANGS)])


USER_MODULE = """
import ctypes, subprocess, sys, time

def grade(problem, response):
    if response == "hang":
        return pow(3, 10**10) > 0
    if response == "sleep":
        time.sleep(0.4)
    if response == "allocate":
        return len([bytearray(2**20) for _ in range(10**6)])
    if response == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", problem.extra["mark"]]).wait()
    if response == "crash":
        ctypes.string_at(0)
    if response == "exit":
        sys.exit(0)
    if response == "raise":
        raise KeyError(response)
    if response == "print":
        print("to the log", flush=True)
    if response == "none":
        return None
    if response == "half":
        return 0.5
    if response == "list":
        return [1]
    return problem.answer == response and problem.extra.get("table", {1: (2,)}) == {1: (2,)}

def takes_one(problem):
    return True

not_a_function = 3
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("user") / "my_reward.py"
    file.write_text(USER_MODULE)
    return file


@pytest.fixture(scope="module")
def user_function(user_file: Path) -> Iterator[RewardFunction]:
    reward = build_reward(RewardConfig(kind=f"{user_file}:grade", timeout_s=2.0, memory_mib=256))
    yield reward
    reward.close()


def test_a_user_function_cannot_take_the_run_down(user_function: RewardFunction) -> None:
    expected = {"right": "correct", "other": "wrong", "none": "unparseable", "half": "wrong", "raise": "unparseable"}
    expected |= dict.fromkeys(["hang", "allocate", "crash", "exit"], "timeout") | {"print": "wrong"}
    grades = user_function.grade([problem("right", table={1: (2,)})] * len(expected), list(expected))
    assert {text: grade.verdict.value for text, grade in zip(expected, grades, strict=True)} == expected
    assert grades[3].reward == 0.5


def test_waiting_for_a_process_is_not_a_timeout(user_function: RewardFunction) -> None:
    grades = user_function.grade([problem("sleep")] * 16, ["sleep"] * 16)  # 3.2 s of queue against a limit of 2 s
    assert {grade.verdict for grade in grades} == {Verdict.CORRECT}


def test_what_a_killed_process_had_started_dies_with_it(user_function: RewardFunction) -> None:
    mark = f"started-by-{os.getpid()}"
    assert user_function.grade([problem("", mark=mark)], ["child"])[0].verdict is Verdict.TIMEOUT
    assert not [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


def test_an_extra_that_cannot_be_sent_is_named(user_function: RewardFunction) -> None:
    with pytest.raises(RewardError, match=r"problem p: extra: a value cannot be sent"):
        user_function.grade([problem("", value=object())], ["x"])


def test_a_user_function_may_return_a_grade(tmp_path: Path) -> None:
    file = tmp_path / "graded.py"
    file.write_text(
        "from capo_megatron.types import Grade, Verdict\n"
        "def grade(problem, response):\n    return Grade(Verdict.CORRECT, 0.25, response, {'length': 2.0})\n"
    )
    item = (("p", "", (), "a", "", {}), "42")
    assert scorers.user_scorer(f"{file}:grade")(item) == ("correct", 0.25, "42", {"length": 2.0})


def test_a_result_of_the_wrong_type_is_an_error_that_names_the_function(user_file: Path) -> None:
    reward = build_reward(RewardConfig(kind=f"{user_file}:grade", workers=1))
    with pytest.raises(RewardError, match=r"my_reward.py:grade: returned \[1\], a list; allowed is a bool"):
        reward.grade([problem("")], ["list"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no function 'missing'"),
        ("not_a_function", "has no function 'not_a_function'"),
        ("takes_one", r"must be callable as takes_one\(problem, response\)"),
    ],
)
def test_a_user_function_that_cannot_be_used_fails_at_the_start(user_file: Path, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        build_reward(RewardConfig(kind=f"{user_file}:{name}", workers=1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_such_module:f", r"there is no module 'no_such_module'\. Install it, put its folder into PYTHONPATH, or"),
        ("os.nope.deeper:f", r"there is no module 'os\.nope'|there is no module 'os\.nope\.deeper'"),
        ("time:sleep", r"must be callable as sleep\(problem, response\)\. Name another, or"),
        ("os:zzqqzz", r"os has no function 'zzqqzz'\. Define zzqqzz\(problem, response\) there\."),
        ("os:getpidd", r"os has no function 'getpidd'\. Did you mean getpid\?"),
        ("/no/such/file.py:f", "no Python file /no/such/file.py"),
    ],
)
def test_a_user_module_that_cannot_be_imported_fails_at_the_start(kind: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        build_reward(RewardConfig(kind=kind, workers=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "maths"}, "reward.kind: 'maths' is unknown"),
        ({"workers": 0}, "reward.workers: 0 is too small"),
        ({"timeout_s": 0.0}, "reward.timeout_s: 0.0 is too small"),
        ({"memory_mib": 10}, "reward.memory_mib: 10 is too small"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward(RewardConfig(**options))  # type: ignore[arg-type]


def test_grading_processes_do_not_import_torch() -> None:
    code = "import sys; from capo_megatron.rewards import worker, scorers, maths; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_grading_processes_do_not_outlive_a_killed_parent(user_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import marshal\n"
        "from capo_megatron.rewards.pool import WorkerPool\n"
        f"pool = WorkerPool('{user_file}:grade', workers=1, timeout_s=2.0, memory_mib=256)\n"
        "print('ready', flush=True)\n"
        "pool.run([marshal.dumps((('p', '', (), '', '', {}), 'hang'))])\n"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=path) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        time.sleep(1.0)  # until the item has been handed over
        workers = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=30.0)
    assert not alive


# --- the other kinds -----------------------------------------------------------------------------------------------


def test_reasoning_gym_is_correct_from_a_full_score_and_survives_its_scorers() -> None:
    import reasoning_gym

    reward = build_reward(RewardConfig(kind="reasoning_gym", workers=1))
    problems, responses = [], []
    for task, response in [
        ("chain_sum", None),
        ("chain_sum", "junk"),
        ("fraction_simplification", "junk"),  # scores 0.01
        ("prime_factorization", "junk"),  # its scorer raises
    ]:
        entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
        problems.append(problem(entry["answer"], rg_task=task, rg_entry=entry))
        responses.append(f"I think <answer>{entry['answer']}</answer>" if response is None else response)
    grades = reward.grade(problems, responses)
    assert [grade.verdict.value for grade in grades] == ["correct", "wrong", "wrong", "wrong"]
    assert [grade.extra["score"] for grade in grades] == [1.0, 0.0, 0.01, 0.0]
    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(RewardError, match="problem p: extra: 'rg_entry' is missing"):
        reward.grade([problem("", rg_task="chain_sum")], ["1"])
    entry = {"question": "", "answer": "", "metadata": {}}
    with pytest.raises(RewardError, match="reasoning_gym/chain_summ: cannot be set up"):
        reward.grade([problem("", rg_task="chain_summ", rg_entry=entry)], ["1"])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>.", "2"),
        ("</answer> 3", "</answer> 3"),
        (r"it is \boxed{4}", "4"),
        (" 5 ", "5"),
    ],
)
def test_reasoning_gym_reads_tag_then_box_then_all(response: str, answer: str) -> None:
    assert scorers.gym_answer(response) == answer


@pytest.mark.parametrize(
    ("answer", "response", "verdict"),
    [
        ("two words", "  two \n words ", "correct"),
        ("yes", "Let me see.\nyes", "correct"),
        ("yes", "Let me see.\nyes\nno", "wrong"),
        ("yes", r"yes \boxed{no}", "wrong"),
        ("yes", r"no \boxed{yes} of course", "correct"),
        ("yes", "Yes", "wrong"),
        ("yes", "", "wrong"),
        (" ", "yes", "unparseable"),
    ],
)
def test_exact_compares_text(answer: str, response: str, verdict: str) -> None:
    assert grade_exact(problem(answer), response).verdict.value == verdict


@pytest.mark.parametrize(
    ("answer", "extra", "response", "verdict", "extracted"),
    [
        ("7", {"digits": 2}, "17", "correct", "7"),
        ("7", {"digits": 2}, "18", "wrong", "8"),
        ("7", {"digits": 2}, "7", "wrong", None),
        ("7", {"digits": 2}, "117", "wrong", None),
        ("7", {"digits": 2}, "1x", "wrong", None),
        ("7", {"digits": 2}, "17\n", "wrong", None),
        ("7", {"digits": 2}, "\uff117", "wrong", None),
        ("12", {}, " 12\n5 + 6 = 11", "correct", "12"),
        ("12", {}, "012", "correct", "12"),
        ("-3", {}, "= -3", "correct", "-3"),
        ("0", {}, "-0", "correct", "0"),
        ("12", {}, "twelve", "wrong", None),
        ("12", {}, "1" * 5000, "wrong", "1" * 5000),
        ("twelve", {}, "12", "unparseable", "12"),
    ],
)
def test_task_rewards(answer: str, extra: dict[str, int], response: str, verdict: str, extracted: str | None) -> None:
    grade = grade_task(problem(answer, **extra), response)
    assert (grade.verdict.value, grade.extracted) == (verdict, extracted)


@pytest.mark.parametrize("kind", ["exact", "task"])
def test_simple_kinds_need_no_processes(kind: str) -> None:
    reward = build_reward(RewardConfig(kind=kind))
    assert [grade.reward for grade in reward.grade([problem("5")] * 2, ["5", "6"])] == [1.0, 0.0]
    reward.close()
