"""From a problem's text to the prompt the model sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from capo_megatron.data.problems import did_you_mean
from capo_megatron.data.tokenizer import encode
from capo_megatron.errors import DataError

Template = Callable[[str], str]

# The prompt that Qwen2.5-Math was trained on, and CAPO trains it with (arXiv 2409.12122, arXiv 2604.12632).
BOXED_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

_NAMES = ["qwen25-math", "chat", "plain"]


def load_template(
    name: str, system_prompt: str | None, tokenizer: PreTrainedTokenizerBase, instruction: str | None = None
) -> Template:
    """A function from problem text to prompt text. `instruction` is added to the problem's text, in a line of its own.

    `qwen25-math` is ChatML with the boxed instruction as system prompt, open for the assistant; `chat` is the
    tokenizer's own chat template; `plain` is the problem as it is; anything else is a file with a Jinja template,
    which sees `problem`, `messages` and all that a chat template sees. `system_prompt` replaces the template's own.
    Raises DataError if the template or the instruction cannot be used with this tokenizer, or the template would drop
    the problem or the system prompt.
    """
    template = _template(name, system_prompt, tokenizer)
    if instruction is None:
        return template
    try:
        encode(tokenizer, [f"\n{instruction}"])
    except DataError as error:  # of the tokenizer, which knows nothing of instructions
        raise DataError(
            f"algorithm.instruction: {str(error).removeprefix('model.')} It is added to every problem: use a tokenizer "
            "that can write it, or an algorithm without one."
        ) from error
    return lambda problem: template(f"{problem}\n{instruction}")


def _template(name: str, system_prompt: str | None, tokenizer: PreTrainedTokenizerBase) -> Template:
    if name == "plain":
        if system_prompt is not None:
            raise DataError("data.system_prompt: the template plain has no place for it. Use chat or a Jinja file.")
        return lambda problem: problem
    if name == "qwen25-math":
        return _qwen25_math(BOXED_INSTRUCTION if system_prompt is None else system_prompt, tokenizer)
    if name == "chat":
        if not tokenizer.chat_template:
            raise DataError("data.template: chat, but this tokenizer has no chat template. Use plain or a Jinja file.")
        return _checked(_jinja(None, system_prompt, tokenizer), "data.template: chat", system_prompt)
    return _checked(_jinja(_template_text(name), system_prompt, tokenizer), name, system_prompt)


def _qwen25_math(system_prompt: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    added = tokenizer.get_added_vocab()
    lacking = [token for token in ("<|im_start|>", "<|im_end|>") if token not in added]
    if lacking:
        raise DataError(
            f"data.template: qwen25-math needs the token {lacking[0]}, which this tokenizer lacks: the model would "
            "read its characters. Use chat, plain or a Jinja file."
        )
    head = f"<|im_start|>system\n{system_prompt}<|im_end|>\n<|im_start|>user\n"
    return lambda problem: f"{head}{problem}<|im_end|>\n<|im_start|>assistant\n"


def _template_text(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        known = ", ".join(_NAMES)
        raise DataError(f"data.template: {name!r} is none of {known}, nor a file.{did_you_mean(name, _NAMES)}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name}: cannot be read as UTF-8 text ({error}).") from error


def _jinja(text: str | None, system_prompt: str | None, tokenizer: PreTrainedTokenizerBase) -> Template:
    """`text` (None: the tokenizer's own template) rendered as transformers renders a chat template."""
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]

    def render(problem: str) -> str:
        messages = [*system, {"role": "user", "content": problem}]
        prompt = tokenizer.apply_chat_template(
            messages, chat_template=text, tokenize=False, add_generation_prompt=True, problem=problem
        )
        return str(prompt)

    return render


def _checked(template: Template, name: str, system_prompt: str | None) -> Template:
    """`template`, after one rendering that must hold the problem and the system prompt."""
    probe = "What is 2 + 3?"
    try:
        prompt = template(probe)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{name}: the template fails ({type(error).__name__}: {error}).") from error
    if probe not in prompt:
        raise DataError(f"{name}: the template drops the problem. Write {{{{ problem }}}} or use `messages`.")
    if system_prompt is not None and system_prompt.strip() not in prompt:
        raise DataError(f"{name}: the template drops data.system_prompt. Unset it, or use another template.")
    return template
