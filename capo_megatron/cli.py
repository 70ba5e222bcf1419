"""The command line: `capo-megatron train | sample | eval | check | doctor`.

Exit codes: 0 done; 2 an error that the user can mend (one line on stderr); 1 a bug (traceback); 128 + n ended by signal
n, e.g. 143 after SIGTERM, on which training finishes its step and saves (as on Ctrl-C and on a closed terminal), or 137
if a rank was killed. The same command then continues. This is the only file that parses arguments or sets exit codes.
Imports are late, so that `--help` and `doctor` answer at once.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from capo_megatron.errors import CapoError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from capo_megatron.config import RunConfig

_ENDED_BY = 128  # plus a signal's number: the exit code of what it ended
_STOP_S = "3600"  # that ranks have to finish their step and save, before the launcher kills them
_AFTERMATH_S = 10.0  # after which a rank that ends was ended by the launcher
_LAUNCH = "capo-megatron-"  # begins the run id of ranks that --nproc starts
_MOST = 100_000  # of samples per problem, or problems, that a flag may ask for
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_PATIENCE_S = 5.0  # how long ranks wait for a word of each other when something went wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(arguments)
    if _started_here():
        _end_with_the_launcher()
    try:
        return options.run(options)
    except CapoError as error:
        if _first_to_say(str(error)):
            print(f"capo-megatron: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    except RuntimeError:  # how the loss of another rank looks from here
        if _explained_by_another_rank():
            return 2
        raise
    except KeyboardInterrupt:
        _first_to_say("interrupted")  # so that no rank that this one leaves behind takes it for a bug
        return _ENDED_BY + signal.SIGINT


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

    command("doctor", _doctor, "show versions and devices; exit 2 on a combination known to be bad")
    return parser


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
        return _start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import run_training

    reached = run_training(config, _say)
    return 0 if reached >= config.train.steps else _ENDED_BY + signal.SIGTERM


def _check(options: argparse.Namespace) -> int:
    config = _load(options)
    from capo_megatron.assemble import describe

    for line in describe(config, options.ranks):
        _say(line)
    return 0


def _sample(options: argparse.Namespace) -> int:
    config = _load(options, training=False)
    if _starts_ranks(options):
        return _start_ranks(options.nproc, options.arguments)
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
        return _start_ranks(options.nproc, options.arguments)
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


def _doctor(_: argparse.Namespace) -> int:
    from capo_megatron.doctor import examine

    report = examine()
    report.print()
    return report.exit_code


# --- targets and ranks ------------------------------------------------------------------------------------------------


def _load(options: argparse.Namespace, training: bool = True) -> RunConfig:
    """The config of a YAML file, of a run's folder, or around a Hugging Face directory; checked for these ranks."""
    from capo_megatron.config import around_model, load

    if _started_here() or os.environ.get("RANK", "0") != "0":
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


def _start_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run this command on `count` local ranks under torch's elastic launcher; its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the failing rank has said it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _STOP_S)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=f"{_LAUNCH}{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "capo_megatron", *arguments)
    except SignalException as stop:
        return _ENDED_BY + stop.sigval
    except ChildFailedError as error:
        began = min(failure.timestamp for failure in error.failures.values())
        found = {rank: (failure.exitcode, failure.timestamp - began) for rank, failure in error.failures.items()}
        return _blame(found)
    return 0


def _blame(failures: Mapping[int, tuple[int, float]]) -> int:
    """The exit code of a run, from the exit code of each rank that failed and the seconds since the first one did."""
    early = {rank: code for rank, (code, seconds) in failures.items() if seconds < _AFTERMATH_S}
    if 2 in early.values():  # one line has been said, whoever was first
        return 2
    killed = [rank for rank, code in early.items() if code < 0 and code != -signal.SIGTERM]
    if not killed:
        code = next(iter(early.values()))
        return code if code > 0 else _ENDED_BY - code
    name = signal.Signals(-early[killed[0]]).name
    print(
        f"capo-megatron: rank {killed[0]} was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}; what "
        "other ranks say is a consequence. The same command again continues training from the newest checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    return _ENDED_BY - early[killed[0]]


def _started_here() -> bool:
    """Whether this process is a rank that `_start_ranks` started."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_LAUNCH)


def _end_with_the_launcher() -> None:
    """Have the kernel send SIGTERM when the launcher dies, however it dies: a rank then finishes its step and saves.

    Linux only; elsewhere ranks of a launcher that was killed go on to the end, as under plain torchrun.
    """
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != launcher:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
    print(text, flush=True)


def _first_to_say(message: str) -> bool:
    """Whether no other rank has printed this message: all of them usually find the same mistake."""
    store = _rank_store()
    if store is None:  # better too often than not at all
        return True
    store.add(_said(), 1)
    return store.add(_said(message), 1) == 1


def _explained_by_another_rank() -> bool:
    """Whether another rank says within a few seconds what ended the run."""
    store = _rank_store()
    if store is None:
        return False
    try:
        store.wait([_said()], timedelta(seconds=_PATIENCE_S))
    except RuntimeError:  # nobody has said anything
        return False
    return True


def _said(message: str = "") -> str:
    """The key under which ranks note that they printed a message, or any."""
    digest = hashlib.sha256(message.encode()).hexdigest() if message else "any"
    return f"capo_megatron/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{digest}"


def _rank_store() -> TCPStore | None:
    """The launcher's store, through which ranks talk even where no process group exists; None if there is none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from torch.distributed import TCPStore

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_PATIENCE_S))
    except (RuntimeError, KeyError, ValueError):  # it is gone or was never there
        return None
