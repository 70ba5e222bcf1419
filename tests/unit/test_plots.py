"""The figure: it draws what there is, says names and numbers beside the lines, and labels never overlap."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capo_megatron.errors import CapoError, DataError
from capo_megatron.evaluation.plots import spread, training_figure
from capo_megatron.types import EvalRecord

PACKAGE = Path(__file__).resolve().parents[2] / "capo_megatron"


def rows(first: float, last: float) -> list[dict]:
    """Validation every ten steps with steps between that have none, as in metrics.jsonl."""
    found = []
    for step in (0, 10, 20):
        accuracy = first + (last - first) * step / 20
        validation = {
            "accuracy": accuracy,
            "accuracy_se": 0.01,
            "auc_mean": 0.8,
            "auc_mean_se": None,
            "auc_questions": 7,
        }
        found.append({"step": step} | {f"validation/{name}": value for name, value in validation.items()})
        found.append({"step": step + 5, "reward/mean": 0.5})
    return found


def records(right: int) -> list[EvalRecord]:
    """Ten questions with ten responses; the first `right` of each are correct and the more confident the earlier."""
    return [
        EvalRecord(
            question=f"q{question}",
            benchmark="bench",
            sample=sample,
            prompt="",
            response="",
            extracted=None,
            answer="",
            correct=sample < right,
            verdict="correct" if sample < right else "wrong",
            tokens=2,
            logprob_sum=-0.1 * (sample + 1),
            truncated=False,
            model="model",
            step=0,
        )
        for question in range(10)
        for sample in range(10)
    ]


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    path = tmp_path_factory.mktemp("figure") / "deep" / "quick.start"
    runs = {"grpo": rows(0.6, 0.8), "capo": rows(0.6, 0.75)}
    evaluated = {"base": records(6), "grpo": records(8), "capo": records(7)}
    return training_figure(runs, evaluated, path), runs, evaluated


def test_there_are_a_png_and_an_svg(figure):
    png, svg = figure[0]
    assert (png.name, svg.name) == ("quick.start.png", "quick.start.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text().rstrip().endswith("</svg>")


def test_lines_are_labelled_directly_with_name_and_last_value(figure):
    drawn = figure[0][1].read_text()
    for label in (
        "grpo 0.800",
        "capo 0.750",
        "capo 0.700",
        "base 0.600",
        "7 mixed",
        "Validation AUC-mean",
        "training step",
    ):
        assert f"<!-- {label} -->" in drawn, label


def test_the_same_numbers_give_the_same_file(figure, tmp_path):
    (_, svg), runs, evaluated = figure
    again = training_figure(runs, evaluated, tmp_path / "again")[1]
    assert again.read_bytes() == svg.read_bytes()


def test_panels_without_data_are_left_out(tmp_path):
    undefined = [{"step": 0, "validation/accuracy": 0.5, "validation/auc_mean": None}]
    drawn = training_figure({"grpo": undefined, "new": []}, {}, tmp_path / "one")[1].read_text()
    assert "Validation accuracy" in drawn and "grpo 0.500" in drawn
    assert "Validation AUC-mean" not in drawn and "Precision" not in drawn


def test_nothing_to_draw_is_an_error_that_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match="nothing to draw"):
        training_figure({"grpo": [{"step": 1, "reward/mean": 0.5}]}, {}, tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapoError, match="cannot be written: a file is in the way"):
        training_figure({"grpo": rows(0.6, 0.8)}, {}, tmp_path / "file" / "figure")


FRACTIONS = st.floats(0, 1)


@given(boxes=st.lists(st.tuples(FRACTIONS, st.sampled_from([0.05, 0.1])), max_size=8))
def test_labels_keep_their_order_and_never_overlap(boxes):
    places, heights = [place for place, _ in boxes], [height for _, height in boxes]
    found = spread(places, heights)
    order = sorted(range(len(boxes)), key=lambda index: places[index])
    for lower, upper in pairwise(order):
        assert found[upper] - found[lower] >= (heights[lower] + heights[upper]) / 2 - 1e-9
    for index in order:
        assert heights[index] / 2 - 1e-9 <= found[index] <= 1 - heights[index] / 2 + 1e-9


def test_labels_stay_where_they_are_if_there_is_room_and_share_a_shift_if_not():
    assert spread([0.9, 0.1], [0.1, 0.1]) == pytest.approx([0.9, 0.1])
    assert spread([0.5, 0.5], [0.1, 0.1]) == pytest.approx([0.45, 0.55])
    assert spread([1.0, 1.0], [0.1, 0.1]) == pytest.approx([0.85, 0.95])
    assert spread([], []) == []


def test_only_this_module_imports_matplotlib_and_it_needs_no_display():
    imports = re.compile(r"^\s*(import|from) matplotlib", re.MULTILINE)
    users = [path.name for path in PACKAGE.rglob("*.py") if imports.search(path.read_text(encoding="utf-8"))]
    assert users == ["drawing.py"]
    script = "import sys; import capo_megatron.evaluation.plots; print('matplotlib.pyplot' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )
