"""DCPO's reader finds the stated confidence and the token where its line begins, from the sampled ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from capo_megatron.algorithms import DcpoConfig, build
from capo_megatron.algorithms.dcpo import UNSTATED, read_confidence
from capo_megatron.errors import RolloutError
from capo_megatron.rollout.collect import Collected, collect
from capo_megatron.seams import SamplingParams, Solo
from capo_megatron.types import Grade, Problem, Reading, Sample, Segment, Verdict
from tests.golden.cases import CASES
from tests.unit.byte_tokenizer import byte_tokenizer


def read(pieces: Sequence[str], text: str | None = None) -> tuple[float, int | None]:
    """(confidence, index of the first token of its line) of a response of these tokens."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[index] for index in ids)

    found = read_confidence(range(len(pieces)), "".join(pieces) if text is None else text, decode)
    assert found.values.keys() == {"confidence"} and set(found.starts.values()) <= {Segment.CONFIDENCE}
    return found.values["confidence"], next(iter(found.starts), None)


@pytest.mark.parametrize(
    ("pieces", "confidence", "start"),
    [
        (["4", "\n", "CONFIDENCE:", " 0.9"], 0.9, 2),
        (["4", "\nCON", "FID", "ENCE", ":", " ", "0", ".", "9"], 0.9, 1),
        (["CONFIDENCE: 0.25"], 0.25, 0),
        (["C", "O", "N", "F", "I", "D", "E", "N", "C", "E", ":", "1"], 1.0, 0),
        (["a ", "CONFIDENCE:", " 0.2", " no, ", "CONFIDENCE:", " 0.7"], 0.7, 4),  # the last one counts
        (["CONFIDENCE:", " 0.2\n", "CONFIDENCE:", " high"], UNSTATED, 2),
        (["4\n", "CONFIDENCE:", " 85"], UNSTATED, 1),
        (["4\n", "CONFIDENCE:", " 1.5"], UNSTATED, 1),
        (["4\n", "CONFIDENCE:", " -0.5"], UNSTATED, 1),
        (["4\n", "CONFIDENCE:", " nan"], UNSTATED, 1),
        (["4\n", "CONFIDENCE:"], UNSTATED, 1),
        (["4\n", "CONFIDENCE", " 0.9"], UNSTATED, None),
        (["4\n", "confidence:", " 0.9"], UNSTATED, None),
        (["4"], UNSTATED, None),
        ([], UNSTATED, None),
    ],
)
def test_the_last_tag_gives_the_confidence_and_the_place(
    pieces: list[str], confidence: float, start: int | None
) -> None:
    assert read(pieces) == (confidence, start)


@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 23, 200])
@pytest.mark.parametrize("after", [0, 1, 6, 30])
def test_the_place_is_found_wherever_it_is(before: int, after: int) -> None:
    pieces = ["x"] * before + ["CONFI", "DENCE:", " 0.5", "\n"] + ["y"] * after
    assert read(pieces) == (0.5, before)


def test_text_without_tokens_of_its_own_has_no_place() -> None:
    assert read(["4"], "4\nCONFIDENCE: 0.5") == (0.5, None)
    assert read([], "CONFIDENCE: 0.5") == (0.5, None)


def test_bytes_of_split_characters_before_the_line_do_not_move_it() -> None:
    tokenizer = byte_tokenizer()
    start, line = "∑ = 4 ✓ 日本", "CONFIDENCE: 0.75"
    ids = tokenizer.encode(start + line, add_special_tokens=False)
    before = len(start.encode())
    assert len(ids) == before + len(line)  # a byte, a token
    found = read_confidence(ids, start + line, tokenizer.decode)
    assert found == Reading({"confidence": 0.75}, {before: Segment.CONFIDENCE}, start)


@pytest.mark.parametrize("number", range(len(CASES["dcpo_parse_confidence"]["inputs"]["text"])))
def test_confidences_are_read_as_in_the_golden_case(number: int) -> None:
    case = CASES["dcpo_parse_confidence"]
    want = case["expected"]["confidence_recommended"][number]
    got, _ = read(list(case["inputs"]["text"][number]))
    assert got == (UNSTATED if want is None else want)


# --- from the engine to the batch -----------------------------------------------------------------------------------

TEXTS = ["4\nCONFIDENCE: 0.9", "5", "", "6 CONFIDENCE: 7"]


class ByteEngine:
    """Answers `TEXTS`, one token per byte, to prompts of any length."""

    version, share = 0, (0, 1)

    def __init__(self, surplus: int = 0, logprob: float = -0.5) -> None:
        self._surplus, self._logprob = surplus, logprob

    def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        return [[self._sample(text) for text in TEXTS[:samples]] for _ in problems]

    def _sample(self, text: str) -> Sample:
        ids = tuple(text.encode())
        return Sample(ids, (self._logprob,) * (len(ids) + self._surplus), text, False, 0)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def logprobs(self, sequences: object, temperature: float) -> list[list[float]]:
        return []

    def load_weights(self, hf: object, version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class AllRight:
    def __init__(self) -> None:
        self.graded: list[str] = []

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        self.graded = list(responses)
        return [Grade(Verdict.CORRECT, 1.0) for _ in responses]

    def close(self) -> None: ...


def collected(engine: ByteEngine, *prompts: tuple[int, ...], progress: float = 0.0) -> Collected:
    problems = [Problem(f"p{index}", "", prompt, "") for index, prompt in enumerate(prompts)]
    read = build(DcpoConfig()).read
    return collect(engine, AllRight(), problems, 4, SamplingParams(32), Solo(), 0, read=read, progress=progress)


def test_readings_become_rewards_and_segments_behind_prompts_of_any_length() -> None:
    batch = collected(ByteEngine(), (1, 2), (1, 2, 3, 4, 5), progress=0.25).batch
    assert batch.progress == 0.25
    assert batch.rewards["confidence"].tolist() == pytest.approx([0.9, -1, -1, -1] * 2)
    for row, text in enumerate(TEXTS * 2):
        segment = batch.segment[row][batch.response_mask[row]].tolist()
        start = text.find("CONFIDENCE:") if "CONFIDENCE:" in text else len(text)
        assert segment == [Segment.REASONING] * start + [Segment.CONFIDENCE] * (len(text) - start)
    assert not batch.segment[~batch.response_mask].any()


def test_selected_and_joined_rollouts_keep_readings_segments_rounds_and_progress() -> None:
    first, second = (
        collected(ByteEngine(), (1,), (1, 2), progress=0.5),
        collected(ByteEngine(), (1, 2, 3), progress=0.5),
    )
    joined = Collected.join([first.select([1]), second.select([]), second], pad_id=0)
    whole = collected(ByteEngine(), (1, 2), (1, 2, 3)).batch
    assert torch.equal(joined.batch.rewards["confidence"], whole.rewards["confidence"])
    assert torch.equal(joined.batch.segment, whole.segment) and torch.equal(joined.batch.tokens, whole.tokens)
    assert joined.batch.progress == 0.5
    metrics = joined.metrics()
    assert metrics["rollout/rounds"] == 3 and metrics["rollout/rejected"] == pytest.approx(1 - 2 / 4)
    assert metrics["verdict/correct"] == 1.0


@pytest.mark.parametrize(
    "engine", [ByteEngine(surplus=1), ByteEngine(logprob=float("nan")), ByteEngine(logprob=float("-inf"))]
)
def test_samples_without_a_finite_log_prob_for_each_token_are_refused(engine: ByteEngine) -> None:
    with pytest.raises(RolloutError, match=r"problem 'p0': \d+ log-probs for 17 tokens"):
        collected(engine, (1, 2))


def test_the_confidence_line_is_not_graded_but_stays_in_the_text() -> None:
    grader = AllRight()
    problem = Problem("p", "", (1,), "4")
    found = collect(ByteEngine(), grader, [problem], 4, SamplingParams(32), Solo(), 0, read=read_confidence)
    assert grader.graded == ["4", "5", "", "6"] and found.texts == TEXTS
