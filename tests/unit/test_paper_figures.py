"""`capo-megatron plot`: what is drawn are the runs' numbers, labelled by what they are; and what half a run gives."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from capo_megatron.algorithms import ALGORITHMS
from capo_megatron.cli import evaluation, main
from capo_megatron.errors import ConfigError, DataError
from capo_megatron.evaluation.metrics import measure
from capo_megatron.evaluation.plots import FIGURES, drawing, plot_runs
from capo_megatron.evaluation.plots.methods import gather_methods
from capo_megatron.evaluation.records import read_records, write_records
from capo_megatron.evaluation.table import read_table
from capo_megatron.runlog import read_rows
from tests.unit.paper_runs import STEPS, write_run

BENCHMARKS = ("aime", "amc")
OVER_STEPS = ("calibration", "accuracy", "trajectory")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO and CAPO, two seeds each."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(folder / f"grpo-{seed}", "grpo", seed, 0.8, 0.7, BENCHMARKS, noise=0.02)
        write_run(folder / f"capo-{seed}", "capo", seed, 0.75, 0.8, BENCHMARKS, {"tau": 0.4}, noise=0.02)
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Name -> figure, instead of saving it, which takes most of the time."""
    found: dict[str, Figure] = {}

    def kept(figure: Figure, path: Path) -> list[Path]:
        found[path.name] = figure
        return [path]

    monkeypatch.setattr(drawing, "_save", kept)
    return found


Plot = Callable[..., list[str]]


@pytest.fixture
def plot(tmp_path: Path, drawn: dict[str, Figure]) -> Plot:
    """Draw; the lines about what was left out."""
    return lambda paths, *names: plot_runs(sorted(paths), tmp_path / "figures", names)[1]


def labels(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].texts]


def line(figure: Figure, label: str, panel: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x and y of the line whose end that label stands at."""
    axes = figure.axes[panel]
    text = next(text for text in axes.texts if text.get_text().startswith(label))
    end = axes.transAxes.transform(text.xy)
    lines = [one for one in axes.lines if len(one.get_xdata()) > 2]
    nearest = min(lines, key=lambda one: np.hypot(*(axes.transData.transform(one.get_xydata()[-1]) - end)))
    return np.asarray(nearest.get_xdata()), np.asarray(nearest.get_ydata())


def validation(folder: Path, metric: str) -> np.ndarray:
    return np.array([row[f"validation/{metric}"] for row in read_rows(folder / "metrics.jsonl")])


# --- figures ----------------------------------------------------------------------------------------------------------


def test_points_are_means_over_seeds_with_their_spread(runs: Path, plot: Plot, drawn: dict[str, Figure]) -> None:
    assert plot(runs.iterdir(), "accuracy-auc") == []
    figure = drawn["accuracy-auc"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Mean of 2 benchmarks", *BENCHMARKS]
    seeds = []
    for seed in (0, 1):
        found = measure(read_table([runs / f"grpo-{seed}" / "eval" / f"step_{STEPS[-1]:06d}.jsonl"]))
        seeds.append([[one.values[name] for one in found] for name in ("accuracy", "auc_mean", "auc_questions")])
    per_seed = np.array(seeds)  # [seed, number, benchmark]
    for panel, values in enumerate([per_seed.mean(axis=2), per_seed[:, :, 0], per_seed[:, :, 1]]):
        x, y, mixed = values.mean(axis=0)
        bars = values.std(axis=0, ddof=1)
        axes = figure.axes[panel]
        markers = [one.get_xydata()[0] for one in axes.lines if one.get_marker() == "s"]
        assert np.array(markers) == pytest.approx(np.array([[x, y]]))
        horizontal, vertical = [one for one in axes.lines if one.get_color() == "#D55E00" and one.get_alpha()]
        assert horizontal.get_xdata() == pytest.approx([x - bars[0], x + bars[0]])
        assert vertical.get_ydata() == pytest.approx([y - bars[1], y + bars[1]])
        assert f"GRPO ({mixed * (2 if panel == 0 else 1):.0f})" in labels(figure, panel)
    assert {text.split()[0] for text in labels(figure)} == {"base", "CAPO", "GRPO"}


def test_labels_of_points_cover_neither_each_other_nor_a_point(
    runs: Path, plot: Plot, drawn: dict[str, Figure]
) -> None:
    plot(runs.iterdir(), "accuracy-auc")
    for axes in drawn["accuracy-auc"].axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(Bbox.intersection(a, b) for a, b in combinations(boxes, 2))
        points = [one.get_xydata()[0] for one in axes.lines if one.get_marker() in ("X", "o", "s")]
        assert len(points) == 3
        for x, y in axes.transData.transform(points):
            assert not any(box.contains(x, y) for box in boxes if box.width < 200)


def test_lines_over_steps_are_means_over_seeds(runs: Path, plot: Plot, drawn: dict[str, Figure]) -> None:
    assert plot(runs.iterdir(), "calibration", "accuracy") == []
    assert [axes.get_title(loc="left") for axes in drawn["calibration"].axes] == [
        "Validation AUC-mean",
        "Validation pooled AUC",
    ]
    for name, metric in (("calibration", "auc_mean"), ("accuracy", "accuracy")):
        values = np.array([validation(runs / f"capo-{seed}", metric) for seed in (0, 1)])
        steps, mean = line(drawn[name], "CAPO")
        assert steps == pytest.approx(STEPS) and mean == pytest.approx(values.mean(axis=0))
        bands = [one for one in drawn[name].axes[0].collections if isinstance(one, PolyCollection)]
        assert len(bands) == 2
        half = np.ptp([y for x, y in bands[0].get_paths()[0].vertices if x == STEPS[-1]]) / 2
        assert half == pytest.approx(values[:, -1].std(ddof=1))
        assert any(text.startswith(f"CAPO {mean[-1]:.3f}") for text in labels(drawn[name]))
    assert any(text.endswith(", 40 mixed") for text in labels(drawn["calibration"]))
    assert drawn["accuracy"].get_supxlabel() == "Mean of 2 seeds. Spread: their standard deviation."


def test_one_run_has_its_standard_error(runs: Path, plot: Plot, drawn: dict[str, Figure]) -> None:
    plot([runs / "capo-0"], "accuracy")
    (band,) = drawn["accuracy"].axes[0].collections
    assert np.ptp([y for x, y in band.get_paths()[0].vertices if x == STEPS[-1]]) / 2 == pytest.approx(0.01)
    assert drawn["accuracy"].get_supxlabel() == "Spread: one standard error over questions."


def test_many_lines_have_bars_at_their_end_and_all_look_different(
    tmp_path: Path, plot: Plot, drawn: dict[str, Figure]
) -> None:
    for kind in ALGORITHMS:
        write_run(tmp_path / "runs" / kind, kind)
    plot((tmp_path / "runs").iterdir(), "accuracy", "coverage")
    axes = drawn["accuracy"].axes[0]
    assert not any(isinstance(one, PolyCollection) for one in axes.collections)
    bars = [one.get_segments()[0] for one in axes.collections]
    assert len(bars) == len(ALGORITHMS) and all(np.ptp(bar[:, 1]) == pytest.approx(0.02) for bar in bars)
    styles = drawing.assign_styles(["base", *ALGORITHMS])
    for column in (0, 1, 2):
        assert len({str(styles[name][column]) for name in ["base", *ALGORITHMS]}) == len(ALGORITHMS) + 1
    assert len(labels(drawn["coverage"])) == len(ALGORITHMS) + 1


def test_coverage_ends_with_the_accuracy_of_all(runs: Path, plot: Plot, drawn: dict[str, Figure]) -> None:
    plot(runs.iterdir(), "coverage")
    found = [measure(read_table([runs / f"capo-{seed}" / "eval" / "step_000040.jsonl"]))[0].values for seed in (0, 1)]
    area = np.mean([values["aurc"] for values in found])
    share, precision = line(drawn["coverage"], f"CAPO {area:.3f}")
    assert share[-1] == 1 and (np.diff(share) > 0).all()
    assert precision[-1] == pytest.approx(np.mean([values["accuracy"] for values in found]))


def test_trajectories_lead_from_the_first_to_the_last_validation(
    runs: Path, plot: Plot, drawn: dict[str, Figure]
) -> None:
    plot(runs.iterdir(), "trajectory")
    (axes,) = drawn["trajectory"].axes
    ways = [one.get_xydata() for one in axes.lines if len(one.get_xdata()) == len(STEPS)]
    expected = [
        np.mean([validation(runs / f"grpo-{seed}", metric) for seed in (0, 1)], axis=0)
        for metric in ("accuracy", "auc_mean")
    ]
    assert any(way == pytest.approx(np.stack(expected, axis=1)) for way in ways)
    assert sorted(labels(drawn["trajectory"])) == ["CAPO", "GRPO"]


def test_the_gap_is_that_of_the_equations(tmp_path: Path, plot: Plot, drawn: dict[str, Figure], runs: Path) -> None:
    assert plot([], "gap") == []
    assert plot([], "gap", "coverage")[0].startswith("coverage left out: there are no evaluation records.")
    assert sorted(labels(drawn["gap"])) == ["CAPO tau=0.4", "CAPO tau=0.6", "CAPO tau=1", "GRPO"]
    gap, height = line(drawn["gap"], "CAPO tau=0.6")
    assert height == pytest.approx(2 / 0.6 / (1 + np.exp(gap / 0.6)))
    assert line(drawn["gap"], "GRPO")[1] == pytest.approx(math.sqrt(2), rel=1e-4)
    for tau in (0.2, 0.3):
        write_run(tmp_path / f"{tau}", options={"tau": tau, "norm": "group"})
    plot([tmp_path / "0.2", tmp_path / "0.3"], "gap")
    gap, height = line(drawn["gap"], "CAPO tau=0.2")
    assert height == pytest.approx(1 / 0.2 / (1 + np.exp(gap / 0.2)))
    assert len(labels(drawn["gap"])) == 3


def test_an_ablation_has_one_figure_for_each_option_that_runs_differ_in(
    tmp_path: Path, plot: Plot, drawn: dict[str, Figure]
) -> None:
    for tau, mask in ((1.0, "on"), (0.4, "on"), (0.4, "off"), (1.0, "off"), (0.6, "on")):
        write_run(tmp_path / f"{tau}{mask}", accuracy=0.6 + tau / 5, options={"tau": tau, "mask": mask})
    write_run(tmp_path / "grpo", "grpo")
    assert plot(tmp_path.glob("[01g]*"), "ablation") == []
    assert sorted(drawn) == ["ablation-capo-mask", "ablation-capo-tau"]
    by_tau = drawn["ablation-capo-tau"]
    assert len(by_tau.axes) == 6  # two families, that differ in the mask
    titles = [axes.get_title(loc="left") for axes in by_tau.axes]
    assert titles[0] == "Validation accuracy\nmask=off" and titles[5] == "Entropy, nats per token\nmask=on"
    assert labels(by_tau, 0) == ["tau=0.4 0.680", "tau=1 0.800"]
    assert labels(by_tau, 3) == ["tau=0.4 0.680", "tau=0.6 0.720", "tau=1 0.800"]
    assert labels(by_tau, 4)[0] == "tau=0.4 0.700, 40 mixed"
    shades = [sum(to_rgb(one.get_color())) for one in by_tau.axes[3].lines]
    assert shades == sorted(shades)  # from dark to light


def test_runs_that_differ_in_several_options_at_once_share_a_figure(
    tmp_path: Path, plot: Plot, drawn: dict[str, Figure]
) -> None:
    for high, low in ((2.5, 1.05), (2.1, 1.25)):
        write_run(tmp_path / f"{high}", options={"ref_high": high, "ref_low": low})
    plot([tmp_path / "2.5", tmp_path / "2.1"], "ablation")
    assert labels(drawn["ablation-capo"])[0] == "ref_high=2.1, ref_low=1.25 0.800"


def test_table_1_is_that_of_metrics(runs: Path, tmp_path: Path) -> None:
    paths, notes = plot_runs(sorted(runs.iterdir()), tmp_path / "new", ["scaling"])
    assert notes == [] and [path.name for path in paths] == ["scaling.md", "scaling.csv"]
    rows = list(csv.DictReader(paths[1].open()))
    assert len(rows) == 2 * 3 * 4 * 8  # benchmarks, models, selections, N
    found = [
        measure(read_table([runs / f"grpo-{seed}" / "eval" / "step_000040.jsonl"]))[0].by_samples for seed in (0, 1)
    ]
    for row in rows:
        if (row["benchmark"], row["model"]) == ("aime", "GRPO"):
            method, n = row["selection"].lower(), int(row["n"])
            known = [one["pc" if method == "rpc" and n < 5 else method][n - 1] for one in found]
            assert float(row["accuracy"]) == pytest.approx(np.mean(known))
            assert float(row["sd"]) == pytest.approx(np.std(known, ddof=1)) and row["seeds"] == "2"
    table = paths[0].read_text().splitlines()
    assert re.findall(r"[\w=]+", table[0]) == ["benchmark", "model", "selection", "N=1", "N=2", "N=4", "N=8"]
    assert len([text for text in table if text.startswith("|")]) == 2 + 2 * 3 * 4


# --- which runs are one method ----------------------------------------------------------------------------------------


def names(paths: list[Path]) -> list[tuple[str, int]]:
    return [(method.label, len(method.seeds)) for method in gather_methods(paths)[0]]


def test_seeds_are_one_method_and_a_base_that_runs_share_is_read_once(runs: Path) -> None:
    assert names(sorted(runs.iterdir())) == [("base", 2), ("CAPO", 2), ("GRPO", 2)]


def test_what_is_logged_or_saved_makes_no_other_method_and_options_do(tmp_path: Path) -> None:
    for name, sections in {"a": {}, "b": {"log": {"wandb": "x"}}, "c": {"checkpoint": {"every": 3}}}.items():
        write_run(tmp_path / name, options={"tau": 0.5})
        path = tmp_path / name / "resolved.yaml"
        path.write_text(
            path.read_text() + json.dumps(sections)[1:-1].replace('"', "") + "\n" if sections else path.read_text()
        )
    write_run(tmp_path / "d", options={"tau": 0.5}, data={"task_options": {"flip": 0.15}})
    found = dict(names([tmp_path / name for name in "abcd"]))
    assert found == {"base": 1, "CAPO flip=none": 3, "CAPO flip=0.15": 1}


def test_records_files_belong_to_the_method_that_they_name(runs: Path, tmp_path: Path) -> None:
    for name in ("base", "step_000040"):
        (tmp_path / f"{name}.jsonl").write_bytes((runs / "capo-0" / "eval" / f"{name}.jsonl").read_bytes())
    write_run(tmp_path / "run", options={"tau": 0.4})
    for path in (tmp_path / "run" / "eval").iterdir():
        path.unlink()
    bare = [tmp_path / "step_000040.jsonl", tmp_path / "base.jsonl"]
    assert names(bare) == [("base", 1), ("CAPO", 1)]
    methods, _ = gather_methods([*bare, tmp_path / "run"])
    (capo,) = [method for method in methods if method.kind == "capo"]
    assert capo.options["algorithm.tau"] == 0.4 and sorted(capo.seeds[0].tables) == sorted(BENCHMARKS)


def test_of_several_steps_the_last_is_drawn(runs: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    late = read_records(folder / "eval" / "step_000040.jsonl")
    early = [replace(one, step=20) for one in late]
    write_records(folder / "eval" / "step_000050.jsonl", early)  # names do not matter
    (_, capo), notes = gather_methods([folder])
    assert notes == [] and {step for step, _ in capo.seeds[0].tables.values()} == {40}


# --- what is not there ------------------------------------------------------------------------------------------------


def test_what_runs_cannot_give_is_said_in_a_line_each(
    runs: Path, tmp_path: Path, plot: Plot, drawn: dict[str, Figure]
) -> None:
    (tmp_path / "half").mkdir()
    for name in ("metrics.jsonl", "resolved.yaml"):
        (tmp_path / "half" / name).write_bytes((runs / "capo-0" / name).read_bytes())
    notes = plot([tmp_path / "half"])
    assert [note.split(" left out: ")[0] for note in notes] == ["accuracy-auc", "coverage", "ablation", "scaling"]
    assert "no evaluation records" in notes[0] and all("\n" not in note for note in notes)
    assert set(drawn) == {*OVER_STEPS, "gap"}


def test_records_alone_give_what_needs_no_more(runs: Path, plot: Plot, drawn: dict[str, Figure]) -> None:
    notes = plot([runs / "grpo-0" / "eval" / "base.jsonl", runs / "grpo-0" / "eval" / "step_000040.jsonl"])
    assert {note.split(" left out: ")[0] for note in notes} == {*OVER_STEPS, "ablation"}
    assert set(drawn) == {"accuracy-auc", "coverage", "gap"}


def test_a_torn_evaluation_is_left_out_and_the_rest_is_drawn(tmp_path: Path, plot: Plot) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "eval" / "base.jsonl").write_text('{"question": 1}\n{"question": 2}\n')
    (note,) = plot([folder], "coverage")
    assert note.startswith(f"{folder}/eval/base.jsonl left out: record 1:")
    with pytest.raises(DataError, match=r"base\.jsonl: record 1"):
        plot([folder / "eval" / "base.jsonl"], "coverage")


def test_no_figure_at_all_is_an_error_that_leaves_nothing(tmp_path: Path, plot: Plot) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with pytest.raises(DataError, match=r"^nothing to draw\. accuracy-auc left out: .* scaling left out: "):
        plot([tmp_path / "empty"])
    assert not (tmp_path / "figures").exists()
    with pytest.raises(DataError, match="no run named"):
        plot([])
    with pytest.raises(DataError, match="no such folder or file"):
        plot([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"figure 'colour': unknown\. Choose among accuracy-auc, "):
        plot([tmp_path / "empty"], "colour")


def test_undefined_numbers_are_no_points(tmp_path: Path, plot: Plot) -> None:
    folder = write_run(tmp_path / "run")
    for path in (folder / "eval").iterdir():
        write_records(path, [replace(one, logprob_sum=math.nan) for one in read_records(path)])
    notes = plot([folder], "accuracy-auc", "coverage", "accuracy")
    assert [note.split(":")[0] for note in notes] == ["accuracy-auc left out", "coverage left out"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_the_command_writes_to_figures_and_says_what(
    runs: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", *map(str, runs.iterdir()), "--figures", "accuracy,ablation"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ablation left out: no two runs of one algorithm differ in their options.",
        "figure: figures/accuracy.png",
        "figure: figures/accuracy.svg",
    ]
    assert (place / "figures" / "accuracy.svg").read_text().rstrip().endswith("</svg>")
    assert main(["plot", "nowhere", "--output", "elsewhere"]) == 2 and not (place / "elsewhere").exists()


def test_the_help_names_every_figure() -> None:
    assert tuple(FIGURES) == evaluation._FIGURES
