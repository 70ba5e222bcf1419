"""Where options may stand on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from capo_megatron.cli import main

CONFIG = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def away_from_the_runs_of_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config writes below the current folder, where a quickstart may have left a run with other settings."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        [CONFIG, "train.steps=7", "seed=3", "--ranks", "2"],
        [CONFIG, "--ranks", "2", "train.steps=7", "seed=3"],
        ["--ranks", "2", CONFIG, "train.steps=7", "seed=3"],
        [CONFIG, "train.steps=7", "--ranks", "2", "seed=3"],
    ],
)
def test_overrides_may_stand_before_and_after_flags(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "2 ranks" in shown and "14 in all" in shown


@pytest.mark.parametrize(
    ("arguments", "unknown"),
    [
        (["check", CONFIG, "--ranks", "2", "train.steps"], "train.steps"),
        (["check", CONFIG, "--rank-count=2"], "--rank-count=2"),
        (["doctor", "seed=3"], "seed=3"),
    ],
)
def test_what_is_neither_flag_nor_override_is_refused(
    arguments: list[str], unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert f"unrecognized arguments: {unknown}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("warmup.path=capo", "lies in the run's own folder"),
        ("warmup.path=capo/base", "lies in the run's own folder"),
        ("log.wandb=project", "needs the package wandb"),
    ],
)
def test_check_refuses_what_training_would_refuse(
    override: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["check", CONFIG, override]) == 2
    assert message in capsys.readouterr().err
