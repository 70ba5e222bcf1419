"""Conversions between formats: a mapping of tensors, streamed, that ends whole or not at all.

One thread reads, checks and hashes blocks of tensors while another writes them; a few blocks are in memory at a time.
Under torchrun the ranks share the tensors. The result appears under its name only when it is complete.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import queue
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from capo_megatron.agreement import gather_or_raise, on_first_rank
from capo_megatron.errors import CheckpointError
from capo_megatron.seams import Solo, Team
from capo_megatron.weights import distributed, huggingface
from capo_megatron.weights.checkpoint import Checkpoint, kind_of, locate, open_checkpoint, torch_name
from capo_megatron.weights.distributed import ChunkFiles, Header, stored_name, write_metadata
from capo_megatron.weights.huggingface import SHARD_BYTES, ShardFile, Spec, plan_shards
from capo_megatron.weights.manifest import Entry, Hasher, Manifest, hash_files
from capo_megatron.weights.sources import DTYPES, dtype_name
from capo_megatron.weights.table import Packing, Place, places

# Read, checked and written at a time: small enough to be allocated again and again without the kernel's help, which
# is what large blocks would spend most of their time on.
BLOCK_BYTES = 2**22
CHUNK_BYTES = 2**28  # of one chunk in a dist-checkpoint, all of which a rank reads that needs a part of it
_AHEAD = 8  # blocks that wait to be written
_Item = TypeVar("_Item")

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # bytes done, bytes in all, of this rank


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
    folder = locate(Path(source))
    if kind_of(folder) != "huggingface":
        raise CheckpointError(f"{folder}: a Megatron checkpoint already. To convert it back: megatron-to-hf.")
    found = open_checkpoint(folder)
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
    folder = locate(Path(source))
    if kind_of(folder) == "huggingface":
        raise CheckpointError(f"{folder}: a Hugging Face directory already. To convert it: hf-to-megatron.")
    found = open_checkpoint(folder, config, trust_pickle)
    writer = _HuggingFaceWriter(found, max_shard_bytes)
    return _convert(found, Path(destination), writer, dtype, strict, team or Solo(), say, progress)


class _Writer(Protocol):
    """One format to write."""

    def write(self, reader: _Reader, aside: Path, team: Team) -> Any:
        """Write this rank's share; what the first rank has to know of it. Talks to no other rank."""

    def seal(self, reader: _Reader, aside: Path, parts: Sequence[Any]) -> None:
        """Write what tells where everything lies, from what `write` returned on every rank."""


class _MegatronWriter:
    def __init__(self, found: Checkpoint) -> None:
        self._found = found
        # `seal` needs it, and importing it takes as long as writing a gigabyte: meanwhile the tensors are written.
        threading.Thread(target=importlib.import_module, args=("torch.distributed.checkpoint",), daemon=True).start()

    def write(self, reader: _Reader, aside: Path, team: Team) -> Any:
        mine = _share(places(self._found.shape), lambda place: sum(map(reader.nbytes, place.parts)), team)
        reader.expect(name for place in mine for name in place.parts)
        with closing(ChunkFiles(aside, team.rank)) as files:
            for header, values in _ahead(_chunks(reader, self._found, mine)):
                if header is not None:
                    files.begin(header)
                files.write(values)
            if team.rank == 0:
                files.add_extra(self._found.shape)
            return files.written, files.extra

    def seal(self, reader: _Reader, aside: Path, parts: Sequence[Any]) -> None:
        written, extra = ([entry for part in parts for entry in part[index]] for index in (0, 1))
        write_metadata(aside, self._found.shape, written, extra)


class _HuggingFaceWriter:
    def __init__(self, found: Checkpoint, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes={shard_bytes}: must be positive.")
        self._found, self._shard_bytes = found, shard_bytes

    def _plan(self, reader: _Reader) -> tuple[dict[str, Spec], dict[str, list[str]]]:
        specs = {name: reader.spec(name) for place in places(self._found.shape) for name in place.parts}
        return specs, plan_shards(specs, self._shard_bytes)

    def write(self, reader: _Reader, aside: Path, team: Team) -> Any:
        specs, shards = self._plan(reader)
        mine = _share(list(shards.items()), lambda shard: sum(specs[name].nbytes for name in shard[1]), team)
        reader.expect(name for _, names in mine for name in names)
        for file, names in mine:
            with ShardFile(aside / file, {name: specs[name] for name in names}) as shard:
                for values in _ahead(values for name in names for _, values in reader.blocks(name)):
                    shard.write(values)

    def seal(self, reader: _Reader, aside: Path, parts: Sequence[Any]) -> None:
        specs, shards = self._plan(reader)
        huggingface.write_index(aside, shards, specs)


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
    reader = _Reader(found, _dtype(dtype), strict, progress)
    if found.manifest is not None:
        found.manifest.check_files(found.folder)
    with _one_thread(), _aside(destination, reader.total, team, say) as aside:

        def write() -> tuple[Any, dict[str, Entry], list[str]]:
            part = _on_disk(destination, lambda: writer.write(reader, aside, team))
            return part, reader.entries, reader.complaints

        shares = gather_or_raise(team, write)
        entries = {name: entry for _, mine, _ in shares for name, entry in mine.items()}
        for complaint in [text for _, _, texts in shares for text in texts]:
            say(f"warning: {complaint}")

        def finish() -> None:
            writer.seal(reader, aside, [part for part, _, _ in shares])
            kind = dtype or torch_name(found.dtype)
            described = {**found.config, "torch_dtype": kind, "dtype": kind}
            huggingface.write_companions(aside, described, found.companions)
            tables = [huggingface.INDEX, distributed.METADATA, distributed.COMMON, distributed.BACKENDS]
            ordered = {name: entries[name] for place in places(found.shape) for name in place.parts}
            Manifest(ordered, hash_files(aside, tables)).write(aside)

        on_first_rank(team, lambda: _on_disk(destination, finish))
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
    known = {torch_name(short): dtype for short, dtype in DTYPES.items() if short != "F64"}
    if name is not None and name not in known:
        raise CheckpointError(f"dtype {name!r}: not supported. Use {', '.join(sorted(known))}.")
    return None if name is None else known[name]


def _share(items: Sequence[_Item], nbytes: Callable[[_Item], int], team: Team) -> list[_Item]:
    """This rank's items, in order: each goes to the rank that has least, the largest first."""
    loads, owner = [0] * team.size, {}
    for index in sorted(range(len(items)), key=lambda index: -nbytes(items[index])):
        rank = loads.index(min(loads))
        owner[index] = rank
        loads[rank] += nbytes(items[index])
    return [item for index, item in enumerate(items) if owner[index] == team.rank]


# --- reading ----------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads tensors block by block, looks for NaN, converts, and hashes what comes out."""

    def __init__(self, found: Checkpoint, dtype: torch.dtype | None, strict: bool, progress: Progress) -> None:
        self._source, self._manifest = found.source, found.manifest
        self._dtype, self._strict, self._progress = dtype, strict, progress
        self.entries: dict[str, Entry] = {}
        self.complaints: list[str] = []
        self.total = sum(self.nbytes(name) for place in places(found.shape) for name in place.parts)
        self._done, self._expected = 0, self.total

    def spec(self, name: str) -> Spec:
        """What a tensor will be."""
        dtype = self._source.dtype(name) if self._dtype is None else dtype_name(self._dtype)
        return Spec(dtype, self._source.shape(name))

    def nbytes(self, name: str) -> int:
        return self.spec(name).nbytes

    def expect(self, names: Iterable[str]) -> None:
        """These are the tensors that this rank will read."""
        self._expected = sum(map(self.nbytes, names))

    def blocks(self, name: str, every: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """(first row, values) of a tensor, in order; a block begins at all multiples of `every` rows."""
        spec, source = self.spec(name), self._source
        converted = spec.dtype != source.dtype(name)
        before, after = Hasher(), Hasher()
        bad = 0
        rows = spec.shape[0]
        for start, stop in _spans(rows, max(1, BLOCK_BYTES // max(1, spec.nbytes // rows)), every or rows):
            read = source.read(name, 0, start, stop)
            values = read.to(DTYPES[spec.dtype])
            bad += _count_bad(values)
            after.add(values)
            if self._manifest is not None and converted:
                before.add(read)
            yield start, values
            self._done += values.nbytes
            self._progress(self._done, self._expected)
        if self._manifest is not None:
            self._manifest.check(name, (before if converted else after).digest, source.where(name))
        if bad:
            self._complain(name, bad)
        self.entries[name] = Entry(spec.dtype, spec.shape, after.digest)

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        blocks = [values for _, values in self.blocks(name)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _complain(self, name: str, bad: int) -> None:
        as_what = "" if self._dtype is None else f" as {torch_name(dtype_name(self._dtype))}"
        text = f"{self._source.where(name)}: tensor {name}: {bad} values are NaN or infinite{as_what}"
        if self._strict:
            raise CheckpointError(f"{text}. Nothing was written. Without --strict it is converted as it is.")
        self.complaints.append(text)


def _spans(rows: int, step: int, every: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of at most `step` rows each, none of which crosses a multiple of `every`."""
    start = 0
    while start < rows:
        stop = min(start + step, rows, start // every * every + every)
        yield start, stop
        start = stop


def _count_bad(values: Tensor) -> int:
    """How many values are NaN or infinite. A sum, which any of them spoils, is thirty times faster than counting."""
    if bool(torch.isfinite(values.sum())):
        return 0
    return values.numel() - int(torch.isfinite(values).sum())


def _chunks(reader: _Reader, found: Checkpoint, mine: Iterable[Place]) -> Iterator[tuple[Header | None, Tensor]]:
    """The values of these parameters as they follow in a dist-checkpoint; a header goes with a chunk's first ones."""
    for place in mine:
        above = 0  # rows of the parts before
        if place.rule.packing is Packing.GROUPED:
            packed = place.rule.pack([reader.whole(name) for name in place.parts], found.shape)
            yield _header(place, 0, packed.dtype, tuple(packed.shape)), packed
            continue
        for name in place.parts:
            spec = reader.spec(name)
            rows = max(1, CHUNK_BYTES // max(1, spec.nbytes // spec.shape[0]))
            for start, values in reader.blocks(name, rows):
                size = (min(rows, spec.shape[0] - start), *spec.shape[1:])
                first = start % rows == 0
                yield _header(place, above + start, values.dtype, size) if first else None, values
            above += spec.shape[0]


def _header(place: Place, row: int, dtype: torch.dtype, size: tuple[int, ...]) -> Header:
    offsets = (row, *[0] * (len(size) - 1))
    if place.layer is None:
        return Header(stored_name(place), dtype, offsets, size)
    return Header(stored_name(place), dtype, (place.layer, *offsets), (1, *size))


def _ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """The same items, the next ones made by another thread while one is used."""
    made: queue.Queue[tuple[bool, Any]] = queue.Queue(_AHEAD)
    unwanted = threading.Event()

    def put(done: bool, item: Any) -> None:
        while not unwanted.is_set():
            try:
                made.put((done, item), timeout=0.1)
                break
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(False, item)
                if unwanted.is_set():
                    return
            put(True, None)
        except BaseException as error:  # is raised where the items are used
            put(True, error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            done, item = made.get()
            if done and item is not None:
                raise item
            if done:
                return
            yield item
    finally:
        unwanted.set()
        thread.join()


# --- the destination --------------------------------------------------------------------------------------------------


@contextmanager
def _aside(destination: Path, nbytes: int, team: Team, say: Say) -> Iterator[Path]:
    """A folder beside `destination` that takes its name in the end, or is removed. Collective."""
    aside = destination.with_name(f".{destination.name}.partial")
    lock: list[int] = []
    on_first_rank(team, lambda: lock.append(_on_disk(destination, lambda: _begin(destination, aside, nbytes, say))))
    try:
        yield aside
        on_first_rank(team, lambda: _on_disk(destination, lambda: _take_name(aside, destination)))
    finally:
        if team.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            os.close(lock[0])


def _begin(destination: Path, aside: Path, nbytes: int, say: Say) -> int:
    """Make the folder and lock it; the lock ends with the process, however that ends."""
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination}: exists. Nothing was changed. Remove it or choose another folder.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    if aside.exists():
        os.close(_lock(aside))
        say(f"{aside}: removed, it was left by a conversion that was interrupted; starting from the beginning")
        shutil.rmtree(aside)
    free = shutil.disk_usage(destination.parent).free
    if free < nbytes:
        raise CheckpointError(
            f"{destination.parent}: {free / 1e9:,.2f} GB free, {nbytes / 1e9:,.2f} GB are needed. Nothing was written. "
            "Free disk space or choose another folder."
        )
    aside.mkdir()
    return _lock(aside)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: another conversion is writing it. Wait for it, or stop it.") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def _take_name(aside: Path, destination: Path) -> None:
    if destination.exists():
        raise CheckpointError(f"{destination}: was made by somebody else meanwhile. Nothing was changed.")
    aside.rename(destination)


def _on_disk(destination: Path, action: Callable[[], _Item]) -> _Item:
    """What `action` returns; if the disk is full or a folder closed to us, an error that says so."""
    try:
        return action()
    except OSError as error:
        raise CheckpointError(
            f"{destination}: not written: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}. "
            "Free disk space or choose another folder."
        ) from error
