"""What a run finds and leaves in its output folder, without any rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from capo_megatron.errors import CapoError, CheckpointError
from capo_megatron.mcore.checkpoint import DistCheckpointStore, read_header
from capo_megatron.runlog import write_text
from capo_megatron.seams import Solo

HEADER = {"step": 2, "model": {}, "layout": {}, "state": {}}


def saved(output: Path, *names: str) -> DistCheckpointStore:
    for name in names:
        (output / "checkpoints" / name).mkdir(parents=True)
        (output / "checkpoints" / name / "state.json").write_text(json.dumps(HEADER))
    return DistCheckpointStore(output, Solo())


def test_text_replaces_what_a_link_leads_to_and_no_device(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    os.mkfifo(pipe)
    write_text(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    with pytest.raises(CapoError, match="not a regular file"):
        write_text(pipe, "lost")
    assert pipe.is_fifo()


def test_without_latest_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    store = saved(tmp_path, "step_000002", "step_000010")
    (tmp_path / "checkpoints" / "step_000020.unfinished").mkdir()
    (tmp_path / "checkpoints" / "step_000030").mkdir()  # nothing complete in it
    assert store.steps() == [2, 10] and store.latest() == 10
    assert DistCheckpointStore(tmp_path / "elsewhere", Solo()).latest() is None


def test_copies_of_checkpoints_are_nobodys_business(tmp_path: Path) -> None:
    store = saved(tmp_path, "step_000002", "step_000010_good", "step_x")
    assert store.steps() == [2]
    for name in ("step_000010_good", "step_x", ""):
        (tmp_path / "checkpoints" / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="not a complete checkpoint"):
            store.latest()


@pytest.mark.parametrize("change", [{"model": []}, {"layout": 1}, {"state": 2}, {"step": "2"}])
def test_a_damaged_description_of_a_checkpoint_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(HEADER | change))
    with pytest.raises(CheckpointError, match="not the description of a checkpoint"):
        read_header(tmp_path)
