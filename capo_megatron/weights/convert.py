"""Conversions between formats: a mapping of tensors, streamed, that ends whole or not at all.

Two threads take one parameter after another, and read, check, hash and write it block by block, so that little more
than a block each is in memory. Under torchrun the ranks share the parameters. The result appears under its name only
when it is complete.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from capo_megatron.agreement import gather_or_raise, on_first_rank
from capo_megatron.errors import CheckpointError
from capo_megatron.seams import Solo, Team
from capo_megatron.weights import distributed, huggingface
from capo_megatron.weights.aside import aside, on_disk
from capo_megatron.weights.checkpoint import Checkpoint, open_checkpoint, torch_name
from capo_megatron.weights.distributed_files import ChunkFiles, Header, stored_name, write_metadata
from capo_megatron.weights.huggingface import SHARD_BYTES, ShardFile, Spec, plan_shards
from capo_megatron.weights.manifest import Entry, Manifest, hash_files
from capo_megatron.weights.metadata import METADATA
from capo_megatron.weights.reading import Progress, Reader
from capo_megatron.weights.sources import DTYPES
from capo_megatron.weights.table import Packing, Place, hf_shapes, places

CHUNK_BYTES = 2**28  # of one chunk in a dist-checkpoint, all of which a rank reads that needs a part of it
_AROUND = 4096  # bytes that a tensor may take in headers and tables
_LANES = 2  # parameters that are converted at a time
_Item = TypeVar("_Item")

Say = Callable[[str], None]


def _quiet(_: str) -> None:
    pass


def _unseen(_: int, __: int) -> None:
    pass


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    destination: Path
    tensors: int
    nbytes: int
    seconds: float
    peak_bytes: int  # resident memory of this process at most, from its start on

    def __str__(self) -> str:
        return (
            f"{self.destination}: {self.tensors:,} tensors, {self.nbytes / 1e9:,.2f} GB in {self.seconds:.1f} s "
            f"({self.nbytes / 1e9 / max(self.seconds, 1e-9):.2f} GB/s), peak memory {self.peak_bytes / 1e9:.2f} GB"
        )


def hf_to_megatron(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    strict: bool = False,
    team: Team | None = None,
    say: Say = _quiet,
    progress: Progress = _unseen,
) -> Summary:
    """Write a Hugging Face directory as a Megatron dist-checkpoint, which any TP x PP x virtual stages can load.

    Args:
        source: directory with config.json and safetensors, sharded or not.
        destination: a folder that does not exist yet. It also gets config.json, the tokenizer's files, and a manifest.
        dtype: float32, bfloat16 or float16; default: as each tensor is.
        strict: make NaN and infinity an error; else they are said and copied.
        team: the ranks that share the work (`ranks.start`); default: this process alone.
        say: shows a line to the user.       progress: hears (bytes done, bytes in all).

    Raises CheckpointError if anything about the source or the destination is wrong. There is no destination then.
    """
    found = open_checkpoint(source)
    if found.kind != "huggingface":
        raise CheckpointError(f"{found.folder}: a Megatron checkpoint already. To convert it back: megatron-to-hf.")
    return _convert(found, Path(destination), _MegatronWriter(found), dtype, strict, team or Solo(), say, progress)


def megatron_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    config: str | Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    strict: bool = False,
    trust_pickle: bool = False,
    team: Team | None = None,
    say: Say = _quiet,
    progress: Progress = _unseen,
) -> Summary:
    """Write a Megatron checkpoint of any layout as a Hugging Face directory; only the model's tensors are read.

    Args:
        source: a run's folder or one of its checkpoints, a converted model, a dist-checkpoint of Megatron-LM or NeMo 2,
            or a folder of mp_rank_* folders.
        destination: a folder that does not exist yet.
        config: Hugging Face directory with the model's config.json and tokenizer, for a source that has none.
        dtype: float32, bfloat16 or float16; default: as each tensor is.
        max_shard_bytes: of one safetensors file.
        strict: make NaN and infinity an error; else they are said and copied.
        trust_pickle: unpickle mp_rank_* files that hold more than tensors and numbers. Runs code of their author.
        team: the ranks that share the work (`ranks.start`); default: this process alone.
        say: shows a line to the user.       progress: hears (bytes done, bytes in all).

    Raises CheckpointError if anything about the source or the destination is wrong. There is no destination then.
    """
    found = open_checkpoint(source, config, trust_pickle)
    if found.kind == "huggingface":
        raise CheckpointError(f"{found.folder}: a Hugging Face directory already. To convert it: hf-to-megatron.")
    writer = _HuggingFaceWriter(found, max_shard_bytes)
    return _convert(found, Path(destination), writer, dtype, strict, team or Solo(), say, progress)


class _Writer(Protocol):
    """One format to write."""

    def write(self, reader: Reader, folder: Path, team: Team) -> Any:
        """Write this rank's share; what the first rank has to know of it. Talks to no other rank."""

    def seal(self, reader: Reader, folder: Path, parts: Sequence[Any]) -> None:
        """Write what tells where everything lies, from what `write` returned on every rank."""


class _MegatronWriter:
    def __init__(self, found: Checkpoint) -> None:
        self._found = found

    def write(self, reader: Reader, folder: Path, team: Team) -> Any:
        _check_dtypes(reader, self._found)
        mine = _share(places(self._found.shape), lambda place: sum(map(reader.nbytes, place.parts)), team)
        reader.expect(name for place in mine for name in place.parts)
        with ChunkFiles(folder, team.rank) as files:

            def convert(place: Place) -> None:
                for header, blocks in self._chunks(reader, place):
                    hole = files.begin(header)
                    for values in blocks:
                        hole.fill(values)

            _side_by_side(reader, convert, mine)
            if team.rank == 0:
                files.add_extra(self._found.shape)
            return files.written, files.extra

    def _chunks(self, reader: Reader, place: Place) -> Iterator[tuple[Header, Iterable[Tensor]]]:
        """The chunks in which a parameter lies, and the values of each as they follow."""
        if place.rule.packing is Packing.GROUPED:
            packed = place.rule.pack([reader.whole(name) for name in place.parts], self._found.shape)
            yield _header(place, 0, packed.dtype, tuple(packed.shape)), [packed]
            return
        above = 0  # rows of the parts before
        for name in place.parts:
            spec = reader.spec(name)
            rows = max(1, CHUNK_BYTES // max(1, spec.nbytes // spec.shape[0]))
            tensor = reader.tensor(name)
            for start in range(0, spec.shape[0], rows):
                stop = min(start + rows, spec.shape[0])
                header = _header(place, above + start, DTYPES[spec.dtype], (stop - start, *spec.shape[1:]))
                yield header, tensor.blocks(start, stop)
            tensor.finish()
            above += spec.shape[0]

    def seal(self, reader: Reader, folder: Path, parts: Sequence[Any]) -> None:
        written, extra = ([entry for part in parts for entry in part[index]] for index in (0, 1))
        write_metadata(folder, self._found.shape, written, extra)


class _HuggingFaceWriter:
    def __init__(self, found: Checkpoint, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes={shard_bytes}: must be positive.")
        self._found, self._shard_bytes = found, shard_bytes

    def _plan(self, reader: Reader) -> tuple[dict[str, Spec], dict[str, list[str]]]:
        specs = {name: reader.spec(name) for place in places(self._found.shape) for name in place.parts}
        return specs, plan_shards(specs, self._shard_bytes)

    def write(self, reader: Reader, folder: Path, team: Team) -> Any:
        specs, shards = self._plan(reader)
        mine = _share(list(shards.items()), lambda shard: sum(specs[name].nbytes for name in shard[1]), team)
        reader.expect(name for _, names in mine for name in names)
        with ExitStack() as files:
            owner = {}
            for file, names in mine:
                shard = files.enter_context(ShardFile(folder / file, {name: specs[name] for name in names}))
                owner.update(dict.fromkeys(names, shard))

            def convert(names: list[str]) -> None:
                for name in names:
                    tensor = reader.tensor(name)
                    for values in tensor.blocks():
                        owner[name].write(name, values)
                    tensor.finish()

            together = ([name for name in place.parts if name in owner] for place in places(self._found.shape))
            _side_by_side(reader, convert, [names for names in together if names])

    def seal(self, reader: Reader, folder: Path, parts: Sequence[Any]) -> None:
        specs, shards = self._plan(reader)
        huggingface.write_index(folder, shards, specs)


def _convert(
    found: Checkpoint,
    destination: Path,
    writer: _Writer,
    dtype: str | None,
    strict: bool,
    team: Team,
    say: Say,
    progress: Progress,
) -> Summary:
    """Read `found`, let `writer` write, and finish: companions, manifest, the final name."""
    began = time.monotonic()
    reader = Reader(found, _dtype(dtype), strict, progress)
    found.check_files()
    with _one_thread(), aside(destination, reader.total + _AROUND * len(hf_shapes(found.shape)), team, say) as folder:

        def write() -> tuple[Any, dict[str, Entry], list[str]]:
            part = on_disk(destination, lambda: writer.write(reader, folder, team))
            return part, reader.entries, reader.complaints

        shares = gather_or_raise(team, write)
        entries = {name: entry for _, mine, _ in shares for name, entry in mine.items()}
        for complaint in [text for _, _, texts in shares for text in texts]:
            say(f"warning: {complaint}")

        def finish() -> None:
            writer.seal(reader, folder, [part for part, _, _ in shares])
            kind = found.torch_dtype if dtype is None else str(reader.dtype).removeprefix("torch.")
            described = {**found.config, "torch_dtype": kind, "dtype": kind}
            huggingface.write_companions(folder, described, found.companions)
            tables = ["config.json", huggingface.INDEX, METADATA, distributed.COMMON, distributed.BACKENDS]
            ordered = {name: entries[name] for place in places(found.shape) for name in place.parts}
            Manifest(ordered, hash_files(folder, tables)).write(folder)

        on_first_rank(team, lambda: on_disk(destination, finish))
    if found.companions is None:
        say(f"warning: {destination}: without a tokenizer, for {found.folder} does not name one. Copy its files there.")
    return Summary(destination, len(entries), reader.total, time.monotonic() - began, _peak_bytes())


def _peak_bytes() -> int:
    """The most memory that this process has had resident."""
    try:  # what getrusage says includes the process that started this one
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch's work in one thread: several would spin, waiting for each other, on the cores that read and write."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _dtype(name: str | None) -> torch.dtype | None:
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    known = {torch_name(dtype): DTYPES[dtype] for dtype in DTYPES if dtype != "F64"}
    if name is None:
        return None
    if short.get(name, name) not in known:
        raise CheckpointError(f"dtype {name!r}: not supported. Use {', '.join(sorted(known))}.")
    return known[short.get(name, name)]


def _share(items: Sequence[_Item], nbytes: Callable[[_Item], int], team: Team) -> list[_Item]:
    """This rank's items, in order: each goes to the rank that has least, the largest first."""
    loads, owner = [0] * team.size, {}
    for index in sorted(range(len(items)), key=lambda index: -nbytes(items[index])):
        rank = loads.index(min(loads))
        owner[index] = rank
        loads[rank] += nbytes(items[index])
    return [item for index, item in enumerate(items) if owner[index] == team.rank]


def _side_by_side(reader: Reader, work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Do `work` on every item, a few at a time. The first failure is raised, and what is left is not done."""
    with ThreadPoolExecutor(_LANES) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            done, left = wait(futures, return_when=FIRST_EXCEPTION)
            failures = [error for future in done if (error := future.exception()) is not None]
        except BaseException:  # Ctrl-C
            _abandon(reader, futures)
            raise
        if failures:
            _abandon(reader, left)
            raise failures[0]


def _abandon(reader: Reader, futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    reader.stop()


def _check_dtypes(reader: Reader, found: Checkpoint) -> None:
    """Raise CheckpointError if a tensor of the dist-checkpoint, which has all layers, would need two dtypes."""
    first: dict[str, str] = {}
    for place in places(found.shape):
        for name in place.parts:
            other = first.setdefault(stored_name(place), name)
            if reader.spec(name).dtype != reader.spec(other).dtype:
                raise CheckpointError(
                    f"{found.source.where(name)}: tensor {name} is {reader.spec(name).dtype}, {other} is "
                    f"{reader.spec(other).dtype}; Megatron keeps both in {stored_name(place)}. Choose one: --dtype."
                )


def _header(place: Place, row: int, dtype: torch.dtype, size: tuple[int, ...]) -> Header:
    offsets = (row, *[0] * (len(size) - 1))
    if place.layer is None:
        return Header(stored_name(place), dtype, offsets, size)
    return Header(stored_name(place), dtype, (place.layer, *offsets), (1, *size))
