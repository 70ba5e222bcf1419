"""Statistical claims use 2,000 to 20,000 draws; the margins are at least four standard errors."""

from collections import Counter, defaultdict

import pytest

from capo_megatron.config import DataConfig, ModelConfig
from capo_megatron.data import Task, load_data, make_task, tokenizer_for
from capo_megatron.errors import DataError
from capo_megatron.types import Problem

TOKENIZER = tokenizer_for(ModelConfig(), DataConfig(task="chain"))
FAULTLESS = {"slip": 0.0, "shaky": 0.0, "ambiguous": 0.0}


def chain(seed: int = 0, **options: float) -> Task:
    return make_task(DataConfig(task="chain", template="plain", task_options=options), TOKENIZER, seed)


def running(prompt: str, question_mark: str = "") -> str:
    """The results of a question, digit by digit, by Python's own arithmetic."""
    text = prompt.removesuffix("=").replace("?", question_mark)
    value, results = text[0], ""
    for operator, digit in zip(text[1::2], text[2::2], strict=True):
        value = str(eval(f"{value} {operator} {digit}") % 10)
        results += value
    return results


def prompts(problems: list[Problem]) -> list[str]:
    return [problem.prompt for problem in problems]


def test_the_example_of_the_documentation() -> None:
    assert running("3+8*7=") == "17"


def test_keys_are_the_last_result_of_left_to_right_arithmetic_mod_10() -> None:
    problems = chain(ambiguous=0.0).train_problems(2000)
    for problem in problems:
        assert problem.answer == running(problem.prompt)[-1]
        assert problem.extra == {"digits": len(problem.prompt) // 2 - 1, "ambiguous": False, "wrong_key": False}
        assert TOKENIZER.decode(problem.prompt_ids) == problem.prompt
    lengths = Counter(problem.extra["digits"] for problem in problems)
    assert sorted(lengths) == [2, 3, 4, 5]
    assert all(400 < count < 600 for count in lengths.values())
    operators = Counter(symbol for problem in problems for symbol in problem.prompt if symbol in "+-*?")
    assert sorted(operators) == ["*", "+", "-"]
    assert all(abs(count / operators.total() - 1 / 3) < 0.03 for count in operators.values())


def test_underspecified_questions_have_one_hole_and_a_key_of_either_meaning() -> None:
    problems = chain().train_problems(4000)
    holes = [problem for problem in problems if "?" in problem.prompt]
    assert abs(len(holes) / 4000 - 0.4) < 0.035
    plus = decided = 0
    for problem in problems:
        assert problem.extra["ambiguous"] == (problem.prompt.count("?") == 1)
    for problem in holes:
        meanings = [running(problem.prompt, sign)[-1] for sign in "+-"]
        assert problem.answer in meanings
        decided += meanings[0] != meanings[1]
        plus += meanings[0] != meanings[1] and problem.answer == meanings[0]
    assert decided > 0.6 * len(holes)
    assert abs(plus / decided - 0.5) < 0.06
    where = Counter(problem.prompt.index("?") for problem in holes if problem.extra["digits"] == 3)
    assert sorted(where) == [1, 3, 5]
    assert max(where.values()) < 1.5 * min(where.values())


def test_a_faultless_teacher_writes_all_running_results_and_the_end() -> None:
    for prompt, response in chain(**FAULTLESS).demonstrations(500, step=0):
        assert response == running(prompt) + "$"


def steps(task: Task, count: int = 20_000) -> list[tuple[str, str]]:
    """(fact, digit written) of every step of `count` demonstrations; a fact is e.g. "3+8", as the teacher met it."""
    facts = []
    for prompt, response in task.demonstrations(count, step=0):
        before = prompt[0] + response
        facts += [(before[n] + prompt[2 * n + 1 : 2 * n + 3], response[n]) for n in range(len(response) - 1)]
    return facts


def test_slips_are_uniform_digits_from_which_the_chain_goes_on() -> None:
    written = steps(chain(slip=0.3, shaky=0.0, ambiguous=0.0))
    slips = [int(digit) - int(running(fact)) for fact, digit in written if running(fact) != digit]
    assert abs(len(slips) / len(written) - 0.27) < 0.01  # nine of ten slips show
    assert all(abs(count / len(slips) - 1 / 9) < 0.02 for count in Counter(slip % 10 for slip in slips).values())


def test_shaky_facts_are_15_of_300_with_one_wrong_digit_each_written_at_a_rate_of_their_own() -> None:
    written = defaultdict(Counter)
    for fact, digit in steps(chain(slip=0.0, ambiguous=0.0)):
        written[fact][digit] += 1
    shaky = {fact: digits for fact, digits in written.items() if set(digits) != {running(fact)}}
    assert len(written) == 300
    assert len(shaky) == 15
    rates = []
    for fact, digits in shaky.items():
        assert len(digits) == 2
        rates.append(1 - digits[running(fact)] / digits.total())
    assert 0.2 < min(rates) < 0.5 < max(rates) < 1.0
    assert shaky.keys() == {  # they belong to fact_seed, not to the seed of the run
        fact for fact, digit in steps(chain(seed=9, slip=0.0, ambiguous=0.0), 6000) if digit != running(fact)
    }
    other = {fact for fact, digit in steps(chain(slip=0.0, ambiguous=0.0, fact_seed=8), 6000) if digit != running(fact)}
    assert len(other) == 15
    assert other != shaky.keys()


def test_the_teacher_does_not_know_the_key_of_an_underspecified_question() -> None:
    task = chain(slip=0.0, shaky=0.0, ambiguous=1.0, min_ops=1, max_ops=1)
    keys = {problem.prompt: problem.answer for problem in task.train_problems(60)}
    taught = [response[0] == keys[prompt] for prompt, response in task.demonstrations(5000, 0) if prompt in keys]
    # y = 0 and y = 5 decide nothing: 1/5 + 4/5 * 1/2 = 0.6 of the answers agree if the two draws are independent.
    assert abs(sum(taught) / len(taught) - 0.6) < 0.1


def test_demonstrations_are_fresh_at_every_step_and_the_same_when_asked_again() -> None:
    task = chain()
    assert task.demonstrations(64, 3) == task.demonstrations(64, 3) == chain().demonstrations(64, 3)
    assert task.demonstrations(64, 3) != task.demonstrations(64, 4)
    assert task.demonstrations(64, 3) != chain(seed=1).demonstrations(64, 3)


def test_splits_are_disjoint_for_every_pair_of_seeds_and_sizes() -> None:
    train = {prompt for seed in range(2) for prompt in prompts(chain(seed).train_problems(4000))}
    validation = prompts(chain(0).validation_problems(1000))
    evaluation = prompts(chain(0).evaluation_problems(2048))
    assert len(set(validation)) == 1000
    assert len(set(evaluation)) == 2048
    assert not train & set(validation)
    assert not train & set(evaluation)
    assert not set(validation) & set(evaluation)


def test_seeds_change_the_training_pool_only_and_more_problems_extend_fewer() -> None:
    one, two = chain(0), chain(1)
    assert one.train_problems(50) != two.train_problems(50)
    assert one.validation_problems(50) == two.validation_problems(50)
    assert one.evaluation_problems(50) == two.evaluation_problems(50)
    assert one.train_problems(1000)[:50] == one.train_problems(50)
    assert len({problem.id for problem in one.train_problems(4000)}) == 4000


def test_problems_and_demonstrations_are_the_same_in_every_process() -> None:
    task = chain()
    assert [(p.prompt, p.answer) for p in task.train_problems(2)] == [("4-1+4-6+5=", "6"), ("0+8+2*5+2=", "2")]
    assert [(p.prompt, p.answer) for p in task.evaluation_problems(2)] == [("8-4-8-0-6=", "0"), ("6*7*4-6-6*9=", "4")]
    assert task.demonstrations(3, 0)[:2] == [("2?3*0+0-0*1=", "90000$"), ("8-6+9*5*6=", "2150$")]


def test_wrong_keys_are_9_fixed_facts_of_the_training_keys_alone() -> None:
    task = chain(wrong_key_share=0.03, ambiguous=0.0, min_ops=1, max_ops=1)
    wrong = [problem for problem in task.train_problems(200) if problem.answer != running(problem.prompt)]
    assert 1 <= len(wrong) <= 9
    assert all(problem.extra["wrong_key"] for problem in wrong)
    problems, same = chain(wrong_key_share=0.03).train_problems(4000), chain().train_problems(4000)
    assert 0.05 < sum(problem.extra["wrong_key"] for problem in problems) / 4000 < 0.13
    assert prompts(same) == prompts(problems)
    differ = [one.answer != other.answer for one, other in zip(same, problems, strict=True)]
    assert differ == [problem.extra["wrong_key"] for problem in problems]
    noisy, clean = chain(wrong_key_share=0.03), chain()
    assert noisy.evaluation_problems(500) == clean.evaluation_problems(500)
    assert noisy.validation_problems(500) == clean.validation_problems(500)
    assert noisy.demonstrations(500, 0) == clean.demonstrations(500, 0)


def test_more_problems_than_there_are_is_an_error() -> None:
    task = chain(ambiguous=0.0, min_ops=1, max_ops=1)
    with pytest.raises(DataError, match=r"data.task=chain: only \d+ distinct train problems .* and 300 are wanted"):
        task.train_problems(300)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slp": 0.1}, 'data.task_options.slp: no such option of chain. Did you mean "slip"? Known: slip, shaky, '),
        ({"slip": 1.5}, "data.task_options.slip: got 1.5, expected a share from 0 to 1."),
        ({"slip": True}, "data.task_options.slip: got True, expected float."),
        ({"min_ops": 2.0}, "data.task_options.min_ops: got 2.0, expected int."),
        ({"min_ops": 6}, "data.task_options.min_ops: got 6 with max_ops=5, expected 1 <= min_ops <= max_ops."),
        ({"fact_seed": -1}, "data.task_options.fact_seed: got -1, expected 0 or more."),
    ],
)
def test_bad_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(DataError) as caught:
        chain(**options)
    assert str(caught.value).startswith(words)


def test_load_data_gives_the_pool_and_the_validation_set() -> None:
    config = DataConfig(task="chain", task_size=100, validation_size=20, template="plain", max_prompt_tokens=10)
    data = load_data(config, TOKENIZER, seed=3)
    pool = chain(3).train_problems(100)
    assert data.train == [problem for problem in pool if problem.extra["digits"] < 5]
    assert data.dropped["train/too_long"] == 100 - len(data.train)
    assert {problem.id for problem in data.validation} < {problem.id for problem in chain().validation_problems(20)}
    with pytest.raises(DataError, match="all 100 prompts are longer, the shortest has 6 tokens"):
        load_data(DataConfig(task="chain", task_size=100, max_prompt_tokens=3), TOKENIZER, seed=3)


def test_unknown_tasks_and_templates_for_tasks_are_refused() -> None:
    with pytest.raises(DataError, match=r"data.task: no task 'chian'. Did you mean \"chain\"\?"):
        make_task(DataConfig(task="chian"), TOKENIZER, seed=0)
    for options in ({"template": "chat"}, {"system_prompt": "Be brief."}):
        with pytest.raises(DataError, match=r"data.template: the task chain writes its own prompts"):
            make_task(DataConfig(task="chain", **options), TOKENIZER, seed=0)
