import json
from pathlib import Path

import pytest

from capo_megatron.config import DataConfig
from capo_megatron.data import load_data, load_problems
from capo_megatron.errors import DataError
from tests.unit.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in rows), encoding="utf-8")
    return str(path)


def numbered(count: int) -> list[tuple[str, str]]:
    return [(f"problem {n}", str(n)) for n in range(count)]


def plain(**options: object) -> DataConfig:
    return DataConfig(template="plain", **options)  # type: ignore[arg-type]


def answers(problems: list) -> list[str]:
    return [problem.answer for problem in problems]


def test_problems_carry_prompt_ids_answer_and_source(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", [("1 + 1?", "2")])
    (problem,) = load_data(DataConfig(train=(file,)), TOKENIZER, seed=0).train
    assert problem.prompt.startswith("<|im_start|>system\nPlease reason step by step")
    assert problem.prompt.endswith("1 + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.decode(problem.prompt_ids) == problem.prompt
    assert (problem.answer, problem.source) == ("2", "set")


def test_ids_come_from_problem_and_answer_and_from_nothing_else(tmp_path: Path) -> None:
    rows = numbered(5)
    one = load_data(plain(train=(write(tmp_path / "a.jsonl", rows),)), TOKENIZER, seed=0).train
    other = load_data(DataConfig(train=(write(tmp_path / "b.jsonl", rows[::-1]),)), TOKENIZER, seed=1).train
    assert [problem.id for problem in one] == [problem.id for problem in other][::-1]
    assert len({problem.id for problem in one}) == 5
    assert one[0].id == "0c5e3b78c4a61cd5"  # the same in every process


def test_duplicates_go_and_those_that_contradict_are_counted_apart(tmp_path: Path) -> None:
    rows = [("caf\u00e9  bill", "1"), ("cafe\u0301 bill ", "1"), ("caf\u00e9\nbill", "2"), ("Caf\u00e9 bill", "3")]
    file = write(tmp_path / "a.jsonl", rows)
    data = load_data(plain(train=(file,)), TOKENIZER, seed=0)
    assert answers(data.train) == ["1", "3"]
    assert data.dropped == {"train/duplicate": 1, "train/conflicting_duplicate": 1}
    assert answers(load_data(plain(train=(file,), dedupe=False), TOKENIZER, seed=0).train) == ["1", "1", "2", "3"]


def test_exact_twins_that_may_stay_get_ids_of_their_own(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [("p", "1"), ("p", "1"), ("q", "1"), ("p", "1")])
    first, second, _, third = load_data(plain(train=(file,), dedupe=False), TOKENIZER, seed=0).train
    assert [second.id, third.id] == [f"{first.id}#2", f"{first.id}#3"]


def test_validation_files_take_their_problems_out_of_training(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", numbered(6))
    validation = write(tmp_path / "validation.jsonl", [(" problem  2", "two"), ("problem 4", "4"), ("new", "0")])
    data = load_data(plain(train=(train,), validation=(validation,)), TOKENIZER, seed=0)
    assert answers(data.train) == ["0", "1", "3", "5"]
    assert answers(data.validation) == ["two", "4", "0"]
    assert data.dropped == {"train/in_validation": 2}
    with pytest.raises(DataError, match=r"data.train: every problem is in the validation files, too"):
        load_data(plain(train=(train,), validation=(train,)), TOKENIZER, seed=0)


def test_a_validation_split_is_seeded_exact_and_disjoint(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", numbered(100))
    splits = [load_data(plain(train=(file,), validation_size=30), TOKENIZER, seed) for seed in (0, 0, 1)]
    for split in splits:
        assert len(split.validation) == 30
        assert sorted(answers(split.train) + answers(split.validation), key=int) == [str(n) for n in range(100)]
    assert splits[0] == splits[1]
    assert answers(splits[0].validation) != answers(splits[2].validation)


def test_a_split_hardly_changes_when_problems_are_added(tmp_path: Path) -> None:
    small, large = (
        load_data(
            plain(train=(write(tmp_path / f"{count}.jsonl", numbered(count)),), validation_size=30), TOKENIZER, seed=0
        )
        for count in (100, 101)
    )
    assert len(set(answers(small.validation)) & set(answers(large.validation))) >= 29


def test_a_split_must_leave_something_to_train_on(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(DataError, match=r"data.validation_size=3: there are only 3 problems"):
        load_data(plain(train=(file,), validation_size=3), TOKENIZER, seed=0)


def test_long_prompts_are_dropped_and_counted_before_the_split(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [*numbered(4), ("x" * 11, "x"), ("y" * 10, "y")])
    data = load_data(plain(train=(file,), max_prompt_tokens=10, validation_size=2), TOKENIZER, seed=0)
    assert sorted(answers(data.train) + answers(data.validation)) == ["0", "1", "2", "3", "y"]
    assert len(data.validation) == 2
    assert data.dropped == {"train/too_long": 1}
    with pytest.raises(
        DataError, match=r"data.max_prompt_tokens=8: all 6 prompts are longer, the shortest has 9 tokens"
    ):
        load_data(plain(train=(file,), max_prompt_tokens=8), TOKENIZER, seed=0)


def test_ids_of_a_column_must_differ(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(json.dumps({"problem": f"p{n}", "answer": "1", "n": n % 2}) + "\n" for n in range(3)), encoding="utf-8"
    )
    with pytest.raises(DataError, match=r"a.jsonl:3: id '0' was used at .*a.jsonl:1. Unset data.id_column"):
        load_data(plain(train=(str(file),), id_column="n"), TOKENIZER, seed=0)


def test_a_benchmark_file_can_be_loaded_by_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "bench.jsonl", [*numbered(2), ("problem 0", "0")])
    problems, dropped = load_problems([file], plain(), TOKENIZER)
    assert ([problem.source for problem in problems], dropped) == (["bench", "bench"], {"duplicate": 1})


def test_no_problems_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data.train: no files"):
        load_data(DataConfig(), TOKENIZER, seed=0)
