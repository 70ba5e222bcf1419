"""The command line: `capo-megatron train | sample | eval | check | convert | doctor`.

Exit codes: 0 done; 2 an error that the user can mend (one line on stderr); 1 a bug (traceback); 128 + n ended by signal
n, e.g. 143 after SIGTERM, on which training finishes its step and saves (as on Ctrl-C and on a closed terminal), or 137
if a rank was killed. The same command then continues. This is the only file that parses arguments or sets exit codes.
Imports are late, so that `--help` and `doctor` answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capo_megatron.errors import CapoError, ConfigError
from capo_megatron.launch import (
    ENDED_BY,
    end_with_the_launcher,
    explained_by_another_rank,
    first_to_say,
    start_ranks,
    started_here,
)

if TYPE_CHECKING:
    from capo_megatron.config import RunConfig

_MOST = 100_000  # of samples per problem, or problems, that a flag may ask for
_LOGITS = 1e-3  # of the largest, by which logits of equal models may differ: rounding in another order
_SHOWN = 10  # differing tensors that are named
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}  # of sizes in bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(arguments)
    if started_here():
        end_with_the_launcher()
    try:
        return options.run(options)
    except CapoError as error:
        if first_to_say(str(error)):
            print(f"capo-megatron: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    except RuntimeError:  # how the loss of another rank looks from here
        if explained_by_another_rank():
            return 2
        raise
    except KeyboardInterrupt:
        first_to_say("interrupted")  # so that no rank that this one leaves behind takes it for a bug
        return ENDED_BY + signal.SIGINT


def _options(arguments: list[str]) -> argparse.Namespace:
    """The parsed arguments. `key=value` may follow flags, too, where argparse alone would not recognize it."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments, argparse.Namespace(arguments=arguments))
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="capo-megatron", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run)
        return added

    def configured(added: argparse.ArgumentParser, what: str, nproc: bool = True) -> None:
        added.add_argument("target", metavar=what, type=Path)
        added.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="options by dotted path, e.g. train.lr=1e-6"
        )
        if nproc:
            added.add_argument("--nproc", type=int, help="start so many ranks on this machine, as torchrun would")

    configured(command("train", _train, "train; a run that finds its own checkpoints resumes"), "CONFIG")
    configured(
        check := command("check", _check, "validate a config, show what it means, start nothing"), "CONFIG", False
    )
    check.add_argument("--ranks", type=int, default=1, help="ranks that the run would have (default 1)")

    sample = command("sample", _sample, "sample responses to prompts")
    configured(sample, "CONFIG|RUN|MODEL")
    sample.add_argument("--prompt", action="append", help="a problem's text, before the template (may be repeated)")
    sample.add_argument("--problems", type=_count, default=4, help="held-out problems to sample, without --prompt")
    sample.add_argument("--n", type=_count, default=1, help="samples per problem")
    sample.add_argument("--base", action="store_true", help="sample from the model before training")
    sample.add_argument("--step", type=int, help="checkpoint to sample from (default: the latest)")

    evaluate = command("eval", _eval, "sample and grade problems; write records and print accuracy and calibration")
    configured(evaluate, "CONFIG|RUN|MODEL")
    evaluate.add_argument("--n", type=_count, help="samples per problem (default: eval.samples)")
    evaluate.add_argument(
        "--problems", type=_count, help="evaluation problems of a task, or the first ones of the files"
    )
    evaluate.add_argument("--base", action="store_true", help="evaluate the model before training")
    evaluate.add_argument("--step", type=int, help="checkpoint to evaluate (default: the latest)")
    evaluate.add_argument("--benchmark", action="append", help="a problem file to evaluate on (may be repeated)")
    evaluate.add_argument("--output", type=Path, help="records file (default: eval/ in the run's folder)")

    configured(engine := command("engine", _engine, "serve runs with rollout.placement=separate"), "CONFIG")
    engine.add_argument("--listen", default="0.0.0.0:29600", metavar="HOST:PORT", help="default: %(default)s")

    _add_convert(commands.add_parser("convert", help=(what := "weights between formats, checked"), description=what))

    command("doctor", _doctor, "show versions and devices; exit 2 on a combination known to be bad")
    return parser


def _add_convert(parser: argparse.ArgumentParser) -> None:
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


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 0 < count <= _MOST:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 to {_MOST:,}")
    return count


# --- commands ---------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    config = _load(options)
    if _starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import run_training

    reached = run_training(config, _say)
    return 0 if reached >= config.train.steps else ENDED_BY + signal.SIGTERM


def _check(options: argparse.Namespace) -> int:
    config = _load(options)
    from capo_megatron.assemble import describe

    for line in describe(config, options.ranks):
        _say(line)
    return 0


def _sample(options: argparse.Namespace) -> int:
    config = _load(options, training=False)
    if _starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import SamplingRequest, run_sampling

    request = SamplingRequest(
        questions=tuple(options.prompt or ()),
        problems=options.problems,
        samples=options.n,
        base=options.base or _is_model(options.target),
        step=options.step,
    )
    run_sampling(config, request, _say)
    return 0


def _eval(options: argparse.Namespace) -> int:
    config = _load(options, training=False)
    if _starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import EvaluationRequest, run_evaluation

    request = EvaluationRequest(
        samples=options.n,
        problems=options.problems,
        base=options.base or _is_model(options.target),
        step=options.step,
        benchmarks=tuple(options.benchmark or ()),
        records=options.output,
        name=options.target.resolve().name if _is_model(options.target) else None,
    )
    run_evaluation(config, request, _say)
    return 0


def _engine(options: argparse.Namespace) -> int:
    from capo_megatron.serving import load_alone, run_engine

    config = load_alone(options.target, options.overrides, _ranks(options))
    if _starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    run_engine(config, options.listen, _say)
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from capo_megatron.doctor import examine

    report = examine()
    report.print()
    return report.exit_code


# --- converting -------------------------------------------------------------------------------------------------------


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
    if _starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    from capo_megatron.weights import ranks

    with _ending_tidily(), ranks.start() as team:
        say = _say if team.rank == 0 else lambda _: None
        with _progress(team.rank == 0) as progress:
            summary = convert(options.src, options.dst, team=team, say=say, progress=progress, **how)
        say(str(summary))
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
        _say(f"{name}: {reason}")
    if len(found.differences) > _SHOWN:
        _say(f"... and {len(found.differences) - _SHOWN} more")
    _say(str(found))
    if options.logits:
        from capo_megatron.mcore.logits import compare_logits

        gap, largest = compare_logits(a, b)
        _say(f"logits on random tokens: they differ by {gap:.3g} at most; the largest is {largest:.3g}")
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
        _say(line)
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


# --- targets and ranks ------------------------------------------------------------------------------------------------


def _load(options: argparse.Namespace, training: bool = True) -> RunConfig:
    """The config of a YAML file, of a run's folder, or around a Hugging Face directory; checked for these ranks."""
    from capo_megatron.config import around_model, load

    if started_here() or os.environ.get("RANK", "0") != "0":
        logging.getLogger("capo_megatron.config").setLevel(logging.ERROR)  # another process has shown the warnings
    target: Path = options.target
    if _is_run(target):  # it may have been moved, and the paths in it start at another folder
        config = load(target / "resolved.yaml", [f"output={target}", *options.overrides])
    elif _is_model(target):
        config = around_model(target, options.overrides)
    elif target.is_dir():
        raise ConfigError(
            f"{target}: neither a run (resolved.yaml) nor a Hugging Face model (config.json) is in there."
        )
    else:
        config = load(target, options.overrides)
    config.check(_ranks(options), training)
    return config


def _is_run(target: Path) -> bool:
    return (target / "resolved.yaml").is_file()


def _is_model(target: Path) -> bool:
    return not _is_run(target) and (target / "config.json").is_file()


def _ranks(options: argparse.Namespace) -> int:
    """How many ranks this command is for: those there are, or those it is told of."""
    if "RANK" in os.environ:
        return int(os.environ.get("WORLD_SIZE", "1"))
    for flag in ("nproc", "ranks"):
        count = vars(options).get(flag)
        if count is not None and count < 1:
            raise ConfigError(f"--{flag} {count}: at least one rank is needed.")
        if count is not None:
            return count
    return 1


def _starts_ranks(options: argparse.Namespace) -> bool:
    return options.nproc is not None and "RANK" not in os.environ


def _say(text: str) -> None:
    print(text, flush=True)
