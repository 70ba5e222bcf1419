import json

import pytest
import reasoning_gym

from capo_megatron.config import DataConfig
from capo_megatron.data import Task, encode, load_data, make_task
from capo_megatron.errors import DataError
from tests.unit.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def one_digit(seed: int = 0, **options: object) -> Task:
    return make_task(DataConfig(task="one_digit", task_options=options), TOKENIZER, seed)  # type: ignore[arg-type]


def gym(name: str, seed: int = 0, template: str = "plain", **options: object) -> Task:
    config = DataConfig(task=f"reasoning_gym/{name}", template=template, task_options=options)  # type: ignore[arg-type]
    return make_task(config, TOKENIZER, seed)


@pytest.mark.parametrize("operation", ["add", "multiply"])
def test_one_digit_prompts_are_right_examples_and_an_open_question(operation: str) -> None:
    task = one_digit(operation=operation)
    assert (task.reward, task.stop) == ("task", ("\n",))
    for problem in task.train_problems(100):
        *shots, question = problem.prompt.split("\n")
        assert len(set(shots)) == 3
        for line in [*shots, f"{question} {problem.answer}"]:
            left, right = line.split(" = ")
            assert eval(left) == int(right)
        assert question.endswith(" =")
        assert not any(shot.startswith(question) for shot in shots)
        assert problem.prompt_ids == tuple(encode(TOKENIZER, [problem.prompt])[0])


def test_one_digit_never_shows_the_answer_to_a_held_out_question() -> None:
    held_out, shown = set(), set()
    for seed in range(2):
        task = one_digit(seed)
        for problem in [*task.validation_problems(200), *task.evaluation_problems(200)]:
            *shots, question = problem.prompt.split("\n")
            held_out.add(question)
            shown |= {shot.split("=")[0] + "=" for shot in shots}
        for prompt in [problem.prompt for problem in task.train_problems(500)]:
            shown |= {line.split("=")[0] + "=" for line in prompt.split("\n")}
        shown |= {line.split("=")[0] + "=" for prompt, _ in task.demonstrations(500, 0) for line in prompt.split("\n")}
    assert len(held_out) == 28
    assert len(shown) == 72
    assert not held_out & shown


def test_one_digit_is_seeded_and_distinct() -> None:
    assert one_digit().train_problems(50) == one_digit().train_problems(100)[:50]
    assert one_digit().train_problems(50) != one_digit(1).train_problems(50)
    assert one_digit().evaluation_problems(50) == one_digit(1).evaluation_problems(50)
    assert len({problem.prompt for problem in one_digit().train_problems(1000)}) == 1000
    prompt, response = one_digit().demonstrations(1, 0)[0]
    assert response == f" {eval(prompt.split(chr(10))[-1].removesuffix(' ='))}\n"
    with pytest.raises(DataError, match=r"only 14 distinct evaluation problems exist"):
        one_digit(shots=0).evaluation_problems(15)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"operation": "divide"}, "operation: got 'divide', expected one of add, multiply."),
        ({"shots": 17}, "shots: got 17, expected 0 to 16."),
        ({"shots": "3"}, "shots: got '3', expected int."),
    ],
)
def test_one_digit_refuses_bad_options(options: dict, words: str) -> None:
    with pytest.raises(DataError, match="data.task_options." + words):
        one_digit(**options)


def test_gym_problems_can_be_graded_from_their_json_entry() -> None:
    for name in ("basic_arithmetic", "leg_counting", "polynomial_multiplication", "knights_knaves"):
        for problem in gym(name).train_problems(3):
            assert problem.extra == json.loads(json.dumps(problem.extra))
            entry = problem.extra["rg_entry"]
            assert problem.extra["rg_config"] == {}
            assert (problem.source, problem.extra["rg_task"]) == (f"reasoning_gym/{name}", name)
            assert (problem.prompt, problem.answer) == (entry["question"], entry["answer"])
            assert reasoning_gym.get_score_answer_fn(name)(problem.answer, entry) == 1.0


def test_gym_prompts_go_through_the_template() -> None:
    (problem,) = gym("chain_sum", template="qwen25-math").train_problems(1)
    assert problem.prompt.endswith(f"{problem.extra['rg_entry']['question']}<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.decode(problem.prompt_ids) == problem.prompt


@pytest.mark.parametrize("name", ["chain", "one_digit"])
def test_a_task_that_writes_its_own_prompts_warns_that_it_has_no_room_for_an_instruction(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = DataConfig(task=name, template="plain")
    make_task(config, TOKENIZER, 0)
    make_task(DataConfig(task="reasoning_gym/gcd", template="plain"), TOKENIZER, 0, "Say how sure you are.")
    assert not caplog.messages
    for seed in range(2):
        make_task(config, TOKENIZER, seed, "Say how sure you are.")
    (warning,) = caplog.messages
    assert warning.startswith(f"data.task={name}: it writes its own prompts, without algorithm.instruction.")


def test_gym_options_reach_the_generator() -> None:
    for problem in gym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1).train_problems(20):
        assert problem.extra["rg_entry"]["metadata"]["num_terms"] == 2
        assert problem.extra["rg_config"] == {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_gym_splits_are_disjoint_and_seeded() -> None:
    task, other = gym("chain_sum"), gym("chain_sum", seed=1)
    splits = [
        {problem.prompt for problem in problems}
        for problems in (task.train_problems(300), task.validation_problems(100), task.evaluation_problems(100))
    ]
    assert [len(split) for split in splits] == [300, 100, 100]
    assert len(set.union(*splits)) == 500
    assert task.train_problems(20) == gym("chain_sum").train_problems(40)[:20]
    assert not splits[0] & {problem.prompt for problem in other.train_problems(20)}
    assert task.evaluation_problems(20) == other.evaluation_problems(20)
    data = load_data(
        DataConfig(task="reasoning_gym/gcd", task_size=5, validation_size=3, template="plain"), TOKENIZER, 0
    )
    assert (len(data.train), len(data.validation), data.dropped) == (5, 3, {})


def test_gym_tasks_with_many_right_answers_leave_the_answer_to_the_scorer() -> None:
    (problem,) = gym("graph_color").train_problems(1)
    assert problem.answer == ""


def test_gym_tasks_whose_scorer_would_fail_every_right_answer_are_refused() -> None:
    with pytest.raises(DataError, match="reasoning_gym/rearc cannot be graded from stored entries"):
        gym("rearc")


def test_gym_tasks_run_out_of_questions() -> None:
    with pytest.raises(DataError, match=r"only \d+ distinct train problems exist"):
        gym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1).train_problems(1000)


def test_gym_refuses_unknown_names_options_and_values() -> None:
    with pytest.raises(
        DataError, match=r"data.task: reasoning-gym has no task 'chan_sum'. Did you mean \"chain_sum\"\?"
    ):
        gym("chan_sum")
    with pytest.raises(DataError, match=r'data.task_options.min_term: no such option .* Did you mean "min_terms"\?'):
        gym("chain_sum", min_term=2)
    with pytest.raises(DataError, match=r"data.task_options: reasoning_gym/chain_sum refuses .*max_terms must be"):
        gym("chain_sum", min_terms=9, max_terms=2)
    with pytest.raises(DataError, match=r"warmup: reasoning_gym/chain_sum has no demonstrations"):
        gym("chain_sum").demonstrations(1, 0)
