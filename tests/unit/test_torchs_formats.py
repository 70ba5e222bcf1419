"""What is written without torch's own writers is what they would have written."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from capo_megatron.weights import metadata
from capo_megatron.weights.metadata import METADATA, Chunk, Stored
from capo_megatron.weights.torch_save import Frames, frame_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_metadata_unpickles_to_torchs_own_records(tmp_path: Path) -> None:
    chunks = (Chunk((0, 0), (2, 3), "__0_0.distcp", 0, 40), Chunk((2, 0), (2, 3), "__1_0.distcp", 7, 40))
    scale = Chunk((), (), "__1_0.distcp", 47, 20)
    tensors = {"a.weight": Stored(torch.bfloat16, (4, 3), chunks), "b": Stored(torch.float32, (), (scale,))}
    nothing = Chunk((), (), "__0_0.distcp", 40, 16)
    metadata.write(tmp_path, tensors, [("a._extra_state", nothing)])

    expected = Metadata(
        state_dict_metadata={
            "a.weight": TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.bfloat16),
                size=torch.Size((4, 3)),
                chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks],
            ),
            "b": TensorStorageMetadata(
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size(()),
                chunks=[ChunkStorageMetadata(torch.Size(()), torch.Size(()))],
            ),
            "a._extra_state": BytesStorageMetadata(),
        },
        storage_data={
            MetadataIndex("a.weight", (0, 0), 0): _StorageInfo("__0_0.distcp", 0, 40),
            MetadataIndex("a.weight", (2, 0), 1): _StorageInfo("__1_0.distcp", 7, 40),
            MetadataIndex("b", (), 0): _StorageInfo("__1_0.distcp", 47, 20),
            MetadataIndex("a._extra_state"): _StorageInfo("__0_0.distcp", 40, 16),
        },
        storage_meta=StorageMeta(),
    )
    found = pickle.loads((tmp_path / METADATA).read_bytes())
    assert found == expected
    assert [index.index for index in found.storage_data] == [0, 1, 0, None]  # which == leaves out
    assert all(
        type(mine) is type(theirs)
        for mine, theirs in zip(found.state_dict_metadata.values(), expected.state_dict_metadata.values(), strict=True)
    )
    with (tmp_path / METADATA).open("rb") as file:
        assert metadata.read(file) == tensors


def test_a_conversion_does_not_wait_for_torchs_checkpoint_package() -> None:
    program = "import sys; from capo_megatron.weights import convert; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "capo_megatron.weights.convert" in loaded and "torch.distributed.checkpoint" not in loaded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(), (1,), (5,), (3, 7), (1, 64, 33), (2, 1000, 100)])
def test_a_frame_with_values_in_it_is_what_torch_saves(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    values = torch.randn(sizes).to(dtype)
    frame = frame_of(dtype, sizes)
    ours = frame.head + values.reshape(-1).view(torch.uint8).numpy().tobytes() + frame.tail
    assert len(ours) == frame.length
    assert torch.equal(torch.load(io.BytesIO(ours), weights_only=True), values)
    torchs = io.BytesIO()
    torch.save(values, torchs)
    assert len(torchs.getvalue()) == frame.length  # they differ in zip's checksums alone


def test_values_are_found_between_frames_seen_before_and_new_ones(tmp_path: Path) -> None:
    """Alike ones are told from those that only have the same length."""
    path, places = tmp_path / "saved", []
    with path.open("wb") as file:
        for number, sizes in enumerate([(4, 6), (4, 6), (6, 4), (4, 6)]):
            begin = file.tell()
            torch.save(torch.full(sizes, float(number)), file)
            places.append((sizes, begin, file.tell() - begin))
    frames = Frames()
    with io.FileIO(path) as file:
        for number, (sizes, begin, length) in enumerate(places):
            start = frames.values_start(file, torch.float32, sizes, begin, length)
            assert os.pread(file.fileno(), 96, start) == torch.full(sizes, float(number)).numpy().tobytes()
        with pytest.raises(ValueError, match=r"it is not of F32 \(4, 6\)"):
            frames.values_start(file, torch.float32, (4, 6), *places[2][1:])
