import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from capo_megatron.config import DataConfig
from capo_megatron.data.problems import answer_text, read_files
from capo_megatron.errors import DataError

ROWS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n), "key": f"q{n}"} for n in range(3)]


def write_lines(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict]) -> str:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def complaint(path: str, config: DataConfig | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_files((path,), config or DataConfig())
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(path)
    return message.removeprefix(path)


def test_the_three_formats_give_the_same_rows(tmp_path: Path) -> None:
    array = tmp_path / "set.json"
    array.write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    files = [write_lines(tmp_path / "set.jsonl", ROWS), write_parquet(tmp_path / "set.parquet", ROWS), str(array)]
    config = DataConfig(id_column="key")
    read = [[(row.problem, row.answer, row.id, row.source) for row in read_files((file,), config)[0]] for file in files]
    assert read[0] == read[1] == read[2] == [(row["problem"], row["answer"], row["key"], "set") for row in ROWS]


def test_json_lines_and_arrays_are_told_apart_by_content_not_by_name(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.json", ROWS)
    array = tmp_path / "array.jsonl"
    array.write_text("\ufeff \n" + json.dumps(ROWS), encoding="utf-8")
    for file in (lines, str(array)):
        assert [row.answer for row in read_files((file,), DataConfig())[0]] == ["0", "2", "4"]


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"problem": "a\u2028b", "answer": "1"}\n', encoding="utf-8")
    assert read_files((str(file),), DataConfig())[0][0].problem == "a\u2028b"


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    files = tuple(write_lines(tmp_path / f"{name}.jsonl", ROWS[n : n + 1]) for n, name in enumerate("ba"))
    rows, _ = read_files(files, DataConfig())
    assert [(row.source, row.answer) for row in rows] == [("b", "0"), ("a", "2")]


def test_dotted_columns_look_into_objects_and_lists(tmp_path: Path) -> None:
    row = {"prompt": [{"content": "1 + 1 = ?"}], "reward_model": {"ground_truth": "2"}, "a.b": "flat"}
    config = DataConfig(prompt_column="prompt.0.content", answer_column="reward_model.ground_truth", id_column="a.b")
    for file in (write_lines(tmp_path / "x.jsonl", [row]), write_parquet(tmp_path / "x.parquet", [row])):
        (read,), _ = read_files((file,), config)
        assert (read.problem, read.answer, read.id) == ("1 + 1 = ?", "2", "flat")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("025", "025"),
        (" 7 ", "7"),
        (27.0, "27"),
        (27, "27"),
        (-0.5, "-0.5"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (1e22, "1" + "0" * 22),
        (["2"], "2"),
        ([27.0], "27"),
        (["$69$", "$84$"], "$69$, $84$"),
        (None, ""),
        ("  ", ""),
        ([], ""),
        (["1", ""], ""),
        ("She sells 9.\n9 * 2 = 18\n#### 18", "18"),
        ("#### 1,000 ", "1,000"),
    ],
)
def test_answers_become_the_plain_text_a_grader_needs(value: object, text: str) -> None:
    assert answer_text(value, "here") == text


@pytest.mark.parametrize(
    ("row", "problem", "answer"),
    [
        ({"problem": "p", "answer": "025"}, "p", "025"),  # AIME
        ({"question": "p", "answer": 27.0}, "p", "27"),  # AMC
        ({"question": "p", "final_answer": ["2"], "answer_type": "Numerical"}, "p", "2"),  # OlympiadBench
        (
            {"problem": "p", "solution": "so \\boxed{4.5e33} or, better, \\boxed{\\frac{1}{2}}"},
            "p",
            "\\frac{1}{2}",
        ),  # Minerva
        ({"question": "p", "answer": "9 * 2 = 18\n#### 18"}, "p", "18"),  # GSM8K
        ({"problem": "p", "question": "q", "answer": "1", "solution": "\\boxed{2}"}, "p", "1"),
    ],
)
def test_public_benchmarks_are_read_as_they_come(
    tmp_path: Path, row: dict[str, object], problem: str, answer: str
) -> None:
    for file in (write_lines(tmp_path / "x.jsonl", [row]), write_parquet(tmp_path / "x.parquet", [row])):
        (read,), _ = read_files((file,), DataConfig(), published=True)
        assert (read.problem, read.answer) == (problem, answer)


def test_files_for_training_need_the_columns_that_the_config_names(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", [{"question": "p", "final_answer": "1"}])
    with pytest.raises(DataError, match=r'no column "problem"'):
        read_files((file,), DataConfig())
    with pytest.raises(DataError, match=r'no column "problem"'):
        read_files((write_lines(tmp_path / "y.jsonl", [{"text": "p", "answer": "1"}]),), DataConfig(), published=True)


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), {"x": 1}, [{"x": 1}], b"1"])
def test_answers_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(DataError, match=r"^here: an answer must be text, a finite number or a list of these, got "):
        answer_text(value, "here")


def test_a_few_rows_without_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"problem": f"p{n}", "answer": n} for n in range(400)]
    rows[17]["answer"], rows[200]["answer"] = None, ""
    read, left_out = read_files((write_lines(tmp_path / "a.jsonl", rows),), DataConfig())
    assert len(read) == 398
    assert left_out == {"no_answer": 2}


def test_many_rows_without_answer_are_an_error_that_names_the_first(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": ""}]
    message = complaint(write_lines(tmp_path / "a.jsonl", rows))
    assert message.startswith(":2: answer is empty (1 of 2 rows;")


def test_a_missing_column_names_the_nearest_one_and_all_there_are(tmp_path: Path) -> None:
    config = DataConfig(prompt_column="problm")
    words = 'no column "problm". Did you mean "problem"? Columns here: answer, key, problem. Set data.prompt_column.'
    assert complaint(write_lines(tmp_path / "a.jsonl", ROWS), config) == ":1: " + words
    assert complaint(write_parquet(tmp_path / "a.parquet", ROWS), config) == ": " + words
    config = DataConfig(answer_column="answer.value")
    assert ':1: no column "answer.value".' in complaint(write_lines(tmp_path / "b.jsonl", ROWS), config)
    assert ': row 1: no column "answer.value".' in complaint(write_parquet(tmp_path / "b.parquet", ROWS), config)


def test_a_column_missing_in_one_line_is_reported_there(tmp_path: Path) -> None:
    message = complaint(write_lines(tmp_path / "a.jsonl", [*ROWS, {"problem": "p"}]))
    assert message == ':4: no column "answer". Columns here: problem. Set data.answer_column.'


def test_bad_json_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROWS[0]) + '\n\n{"problem": "p" "answer": 1}\n', encoding="utf-8")
    assert complaint(str(file)).startswith(":3: not JSON (Expecting ',' delimiter")
    file.write_text('[{"problem": "p"},', encoding="utf-8")
    assert complaint(str(file)).startswith(": not JSON (")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r'{"problem": "a \ud800 b", "answer": "1"}', r"problem holds '\ud800', half a character."),
        (r'{"problem": "a", "answer": ["\udc00"]}', r"answer holds '\udc00', half a character."),
        (r'{"problem": "a", "answer": "1", "id": "\ud800"}', r"an id holds '\ud800', half a character."),
        (r'{"problem": "a", "answer": "1", "id": "1", "other": ["\ud800"]}', r"other holds '\ud800'"),
        pytest.param('{"problem": "a", "answer": ' + "9" * 6000 + "}", "an integer is too long (", id="digits"),
        pytest.param('{"problem": ' + "[" * 100_000, "lists or objects are nested too deeply", id="deep"),
    ],
)
def test_what_json_can_spell_but_no_file_can_mean_is_reported_with_its_line(
    tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"problem": "q", "answer": "1", "id": "0", "other": []}\n' + line + "\n", encoding="utf-8")
    columns = {"id_column": "id"} if '"id"' in line else {}
    columns |= {"perturbed_column": "other"} if '"other"' in line else {}
    assert complaint(str(file), DataConfig(**columns)).startswith(f":2: {words}")


def test_an_array_nested_too_deeply_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000, encoding="utf-8")
    assert complaint(str(tmp_path / "a.json")).startswith(": lists or objects are nested too deeply")


def test_a_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"problem": "p", "answer": "1"}\n{"problem": "caf\xe9"}\n')
    assert complaint(str(tmp_path / "a.jsonl")).startswith(":2: cannot be read as UTF-8 text (byte 0xe9: ")


def test_files_of_one_name_have_sources_of_their_own(tmp_path: Path) -> None:
    def sources(*names: str) -> list[str]:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            write_lines(tmp_path / name, ROWS[:1])
        return [row.source for row in read_files(tuple(str(tmp_path / name) for name in names), DataConfig())[0]]

    assert sources("a/test.jsonl", "b/test.jsonl", "b/other.jsonl") == ["a/test", "b/test", "other"]
    assert sources("a/x/t.jsonl", "b/x/t.jsonl", "b/y/t.jsonl") == ["a/x/t", "b/x/t", "y/t"]
    assert sources("a/test.jsonl", "a/test.json") == ["test.jsonl", "test.json"]
    assert sources("a/test.jsonl", "a/test.jsonl") == ["test", "test"]


def test_lines_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    assert ":1: expected a JSON object" in complaint(write_lines(tmp_path / "a.jsonl", [3]))
    file = tmp_path / "a.json"
    file.write_text("[3]", encoding="utf-8")
    assert ": row 1: expected a JSON object" in complaint(str(file))


@pytest.mark.parametrize(("value", "words"), [("  ", "problem is empty"), (3, "problem must be text, got int 3")])
def test_problems_must_be_text(tmp_path: Path, value: object, words: str) -> None:
    assert words in complaint(write_lines(tmp_path / "a.jsonl", [{"problem": value, "answer": "1"}]))


@pytest.mark.parametrize("value", [None, 1.5, "", True])
def test_ids_must_be_text_or_integers(tmp_path: Path, value: object) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"problem": "p", "answer": "1", "id": value}])
    assert ":1: an id must be text or an integer" in complaint(file, DataConfig(id_column="id"))


def test_files_that_cannot_be_problem_files_are_refused(tmp_path: Path) -> None:
    assert "no such file" in complaint(str(tmp_path / "absent.jsonl"))
    assert "not a problem file, it is a folder. Known kinds: .jsonl, .json, .parquet." in complaint(str(tmp_path))
    assert complaint("").startswith("'': not a problem file, the name is empty. Give a path")
    other = tmp_path / "a.csv"
    other.write_text("problem,answer\n", encoding="utf-8")
    assert "not a problem file" in complaint(str(other))
    binary = tmp_path / "a.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as UTF-8 text" in complaint(str(binary))
    damaged = tmp_path / "a.parquet"
    damaged.write_bytes(b"PAR1 and nothing else")
    assert "damaged or not a parquet file" in complaint(str(damaged))


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("b.jsonl", "\n \n"), ("c.json", "[]")])
def test_an_empty_file_is_an_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert "no problems in this file" in complaint(str(tmp_path / name))


def test_an_empty_parquet_file_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"problem": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "no problems in this file" in complaint(str(tmp_path / "a.parquet"))
