"""The commands of `capo-megatron convert`: weights between formats, comparing two checkpoints, showing one."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from capo_megatron.cli.arguments import say, starts_ranks
from capo_megatron.errors import ConfigError
from capo_megatron.launch import ENDED_BY, start_ranks, started_here

_LOGITS = 1e-3  # of the largest, by which logits of equal models may differ: rounding in another order
_SHOWN = 10  # differing tensors that are named
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}  # of sizes in bytes


def add_convert(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, summary: str, *paths: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run)
        for path in paths:
            added.add_argument(path.lower(), metavar=path, type=Path)
        return added

    def converting(added: argparse.ArgumentParser) -> None:
        added.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as it is)")
        added.add_argument("--strict", action="store_true", help="refuse NaN and infinity instead of warning")
        added.add_argument("--nproc", type=int, help="ranks on this machine that share the tensors")

    def foreign(added: argparse.ArgumentParser) -> None:
        added.add_argument("--config", type=Path, help="Hugging Face directory that describes a foreign checkpoint")
        added.add_argument(
            "--trust-pickle", action="store_true", help="unpickle what its author put into SRC: runs code"
        )

    converting(
        command("hf-to-megatron", _to_megatron, "write a Megatron dist-checkpoint, for any layout", "SRC", "DST")
    )
    back = command("megatron-to-hf", _to_hf, "write a Hugging Face directory of any Megatron checkpoint", "SRC", "DST")
    converting(back)
    foreign(back)
    back.add_argument("--max-shard-size", type=_size, default="5G", help="of a safetensors file, e.g. 5G (default)")
    verify = command(
        "verify", _verify, "compare two checkpoints of any format bit by bit; exit 2 if they differ", "A", "B"
    )
    verify.add_argument("--logits", action="store_true", help="also run both models on random tokens")
    foreign(verify)
    foreign(command("inspect", _inspect, "show what is in a checkpoint of any format", "PATH"))


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(I?)B?", text.strip().upper())
    unit = 0 if found is None else _UNITS[found[2]] if not found[3] else 1024 ** "KMGT".index(found[2] or "K") * 1024
    size = int(float(found[1]) * unit) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of bytes such as 5G or 500MB")
    return size


# --- commands ---------------------------------------------------------------------------------------------------------


def _to_megatron(options: argparse.Namespace) -> int:
    from capo_megatron.weights.convert import hf_to_megatron

    return _converted(options, hf_to_megatron, dtype=options.dtype, strict=options.strict)


def _to_hf(options: argparse.Namespace) -> int:
    from capo_megatron.weights.convert import megatron_to_hf

    return _converted(
        options,
        megatron_to_hf,
        config=options.config,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_size,
        strict=options.strict,
        trust_pickle=_trusts(options),
    )


def _converted(options: argparse.Namespace, convert: Callable[..., object], **how: object) -> int:
    if options.nproc is not None and options.nproc < 1:
        raise ConfigError(f"--nproc {options.nproc}: at least one rank is needed.")
    if starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    from capo_megatron.weights import ranks

    with _ending_tidily(), ranks.start() as team:
        tell = say if team.rank == 0 else lambda _: None
        with _progress(team.rank == 0) as progress:
            summary = convert(options.src, options.dst, team=team, say=tell, progress=progress, **how)
        tell(str(summary))
    return 0


@contextmanager
def _ending_tidily() -> Iterator[None]:
    """Signals that would end the process end the block instead, which then removes what it has half written."""

    def end(number: int, _: object) -> None:
        raise SystemExit(ENDED_BY + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _verify(options: argparse.Namespace) -> int:
    from capo_megatron.weights.checkpoint import open_checkpoint
    from capo_megatron.weights.compare import compare

    a, b = (_opened(path, options, open_checkpoint) for path in (options.a, options.b))
    with _progress(True) as progress:
        found = compare(a, b, progress)
    for name, reason in found.differences[:_SHOWN]:
        say(f"{name}: {reason}")
    if len(found.differences) > _SHOWN:
        say(f"... and {len(found.differences) - _SHOWN} more")
    say(str(found))
    if options.logits:
        from capo_megatron.mcore.logits import compare_logits

        gap, largest = compare_logits(a, b)
        say(f"logits on random tokens: they differ by {gap:.3g} at most; the largest is {largest:.3g}")
        if gap > _LOGITS * largest:
            return 2
    return 2 if found.differences else 0


def _opened(path: Path, options: argparse.Namespace, open_checkpoint: Callable[..., object]) -> Any:
    from capo_megatron.weights.checkpoint import kind_of, locate

    foreign = kind_of(locate(path)) != "huggingface"
    return open_checkpoint(path, options.config if foreign else None, _trusts(options))


def _inspect(options: argparse.Namespace) -> int:
    from capo_megatron.weights.inspect import inspect

    for line in inspect(options.path, _trusts(options)):
        say(line)
    return 0


def _trusts(options: argparse.Namespace) -> bool:
    if options.trust_pickle and not started_here():
        print("warning: --trust-pickle runs whatever code the checkpoint's author put into it", file=sys.stderr)
    return bool(options.trust_pickle)


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes, speed and time left, on a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda _, __: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
