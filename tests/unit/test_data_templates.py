from pathlib import Path

import pytest

from capo_megatron.data.templates import load_template
from capo_megatron.data.tokenizer import character_tokenizer, encode
from capo_megatron.errors import DataError
from tests.unit.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

TOKENIZER = byte_tokenizer(CHAT_TEMPLATE)
QUESTION = "Find $x$ if $x + 1 = 2$."


def test_qwen25_math_is_chatml_with_the_boxed_instruction() -> None:
    prompt = load_template("qwen25-math", None, TOKENIZER)(QUESTION)
    assert prompt == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nFind $x$ if $x + 1 = 2$.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert load_template("qwen25-math", "Be brief.", TOKENIZER)(QUESTION) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" + QUESTION + "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_marks_of_a_chat_are_single_tokens() -> None:
    ids = encode(TOKENIZER, [load_template("qwen25-math", None, TOKENIZER)("")])[0]
    start, end = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids[0], ids.count(start), ids.count(end)) == (start, 3, 2)


def test_chat_is_the_tokenizers_own_template_open_for_the_assistant() -> None:
    user = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert load_template("chat", None, TOKENIZER)(QUESTION) == user
    assert load_template("chat", "Be brief.", TOKENIZER)(QUESTION) == f"<|im_start|>system\nBe brief.<|im_end|>\n{user}"


def test_plain_is_the_problem_as_it_is() -> None:
    assert load_template("plain", None, TOKENIZER)(" 3 + 4 =\n") == " 3 + 4 =\n"


def test_a_jinja_file_sees_the_problem_and_the_messages(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("Question: {{ problem }}\nAnswer:\n", encoding="utf-8")
    assert load_template(str(file), None, byte_tokenizer())("1 + 1?") == "Question: 1 + 1?\nAnswer:"
    file.write_text(CHAT_TEMPLATE, encoding="utf-8")
    own = load_template("chat", "Be brief.", TOKENIZER)
    assert load_template(str(file), "Be brief.", byte_tokenizer())(QUESTION) == own(QUESTION)


def refusal(name: str, system_prompt: str | None = None, chat_template: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        load_template(name, system_prompt, byte_tokenizer(chat_template))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_templates_that_do_not_fit_the_tokenizer_are_refused() -> None:
    assert refusal("chat").startswith("data.template: chat, but this tokenizer has no chat template.")
    with pytest.raises(DataError, match=r"qwen25-math needs the token <\|im_start\|>, which this tokenizer lacks"):
        load_template("qwen25-math", None, character_tokenizer("abc", eos="$", pad="_"))


def test_unknown_templates_are_refused_with_the_nearest_name() -> None:
    assert refusal("qwen-math") == (
        "data.template: 'qwen-math' is none of qwen25-math, chat, plain, nor a file. Did you mean \"qwen25-math\"?"
    )


def test_templates_that_would_drop_something_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ question }}", encoding="utf-8")
    assert "the template drops the problem" in refusal(str(file))
    file.write_text("{{ problem }}", encoding="utf-8")
    assert "the template drops data.system_prompt" in refusal(str(file), "Be brief.")
    assert "the template plain has no place for it" in refusal("plain", "Be brief.")


def test_templates_that_fail_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% if %}", encoding="utf-8")
    assert "mine.jinja: the template fails (TemplateSyntaxError: " in refusal(str(file))
    assert "data.template: chat: the template fails (TemplateError: no system)" in refusal(
        "chat", "Be brief.", "{{ raise_exception('no system') }}"
    )
    file.write_bytes(b"\xff")
    assert "cannot be read as UTF-8" in refusal(str(file))


def test_an_instruction_that_a_tokenizer_of_characters_cannot_write_is_named() -> None:
    assert load_template("plain", None, TOKENIZER, "How sure?")("1+1=") == "1+1=\nHow sure?"
    for symbols, lacking in (("How sure?", r"'\n'"), ("How sur?\n", "'e'")):
        with pytest.raises(DataError) as caught:
            load_template("plain", None, character_tokenizer(symbols, "$", "#"), "How sure?")
        said = str(caught.value)
        assert said.startswith(
            f"algorithm.instruction: tokenizer: it has one token per character, and none for {lacking}."
        )
        assert "\n" not in said
