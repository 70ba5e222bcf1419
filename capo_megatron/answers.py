"""The answer in a response: the content of its last \\boxed{...}. Linear in the length of the text."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\\\|\\[{}]|\\(?:boxed|fbox)\s*\{|[{}]")
_BETWEEN = re.compile(r"(?:[\s,;$.]|\\[\[\]()]|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b){0,20}")
_INVISIBLE = re.compile(r"\s|\\[,;:!> ]|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|[~$]")
_WHITESPACE = re.compile(r"\s+")


def boxed_answer(text: str) -> str | None:
    """What the last balanced \\boxed{...} (or \\fbox{...}) of a response holds; None if there is none.

    Boxes that follow each other with nothing but a separator between them are one answer, joined by commas: listing
    candidates then names a set, which equals none of them, and `\\boxed{1}, \\boxed{2}` is the set {1, 2}.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    start, _, content = boxes[-1]
    parts = [content]
    for earlier, end, content in reversed(boxes[:-1]):
        if start - end > 40 or not _BETWEEN.fullmatch(text, end, start):
            break
        if content != parts[-1]:
            parts.append(content)
        start = earlier
    return ", ".join(reversed(parts))


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every closed box that is not inside another closed one, in order."""
    opened: list[tuple[int, int] | None] = []  # start of a box and of its content; None for a plain brace
    boxes: list[tuple[int, int]] = []
    inner: dict[int, int] = {}
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            opened.append(None)
        elif token[0].endswith("{") and len(token[0]) > 2:
            opened.append((token.start(), token.end()))
        elif token[0] == "}" and opened and (box := opened.pop()):
            while boxes and boxes[-1][0] > box[0]:
                boxes.pop()
            inner[box[0]] = box[1]
            boxes.append((box[0], token.start()))
    return [(start, end + 1, text[inner[start] : end].strip()) for start, end in boxes]


def unboxed(text: str) -> str:
    """`text` without the boxes and math delimiters around the whole of it."""
    text = text.strip()
    while (boxes := _boxes(text)) and boxes[0][:2] == (0, len(text)):
        text = boxes[0][2]
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inside = text[len(left) : -len(right)]
        if text == left + inside + right and left not in inside and right not in inside:
            return unboxed(inside)
    return text


def same_text(one: str, other: str) -> bool:
    """True if two answers look the same when typeset: spacing, delimiter sizes and fraction styles do not count."""
    return _typeset(one) == _typeset(other)


def _typeset(text: str) -> str:
    return re.sub(r"\\[dtc]frac", r"\\frac", _INVISIBLE.sub("", text)).rstrip(".")


def collapsed(text: str) -> str:
    """`text` with every run of white space as one space, and none at the ends."""
    return _WHITESPACE.sub(" ", text).strip()
