"""The command line: `capo-megatron train | sample | eval | check | doctor`.

Exit codes: 0 done, 2 an error that the user can mend (one line on stderr), 1 a bug (traceback). This is the only file
that parses arguments or sets exit codes. Imports are late, so that `--help` and `doctor` answer at once.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from capo_megatron.errors import CapoError, ConfigError

if TYPE_CHECKING:
    from capo_megatron.config import RunConfig

_LAUNCH = "capo-megatron-"  # begins the run id of ranks that --nproc starts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(arguments)
    try:
        return options.run(options)
    except CapoError as error:
        if _first_to_say(str(error)):
            print(f"capo-megatron: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


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
            "overrides", nargs="*", metavar="key=value", help="options by dotted path, e.g. train.lr=1e-6"
        )
        if nproc:
            added.add_argument("--nproc", type=int, help="start so many ranks on this machine, as torchrun would")

    configured(command("train", _train, "train; a run that finds its own checkpoints resumes"), "CONFIG")
    configured(
        check := command("check", _check, "validate a config, show what it means, start nothing"), "CONFIG", False
    )
    check.add_argument("--ranks", type=int, default=1, help="ranks that the run would have (default 1)")

    sample = command("sample", _sample, "sample responses to prompts")
    configured(sample, "CONFIG|RUN")
    sample.add_argument("--prompt", action="append", help="a problem's text, before the template (may be repeated)")
    sample.add_argument("--problems", type=int, default=4, help="validation problems to sample, without --prompt")
    sample.add_argument("--n", type=int, default=1, help="samples per problem")

    evaluate = command("eval", _eval, "sample and grade problems; write records and print accuracy and calibration")
    configured(evaluate, "CONFIG|RUN")
    evaluate.add_argument("--n", type=int, help="samples per problem (default: eval.samples)")
    evaluate.add_argument("--problems", type=int, help="evaluation problems of a task, or the first ones of the files")
    evaluate.add_argument("--base", action="store_true", help="evaluate the model before training")
    evaluate.add_argument("--step", type=int, help="checkpoint to evaluate (default: the latest)")
    evaluate.add_argument("--benchmark", action="append", help="a problem file to evaluate on (may be repeated)")
    evaluate.add_argument("--output", type=Path, help="records file (default: eval/ in the run's folder)")

    command("doctor", _doctor, "show versions and devices; exit 2 on a combination known to be bad")
    return parser


# --- commands ---------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    config = _load(options)
    if _starts_ranks(options):
        return _start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import run_training

    run_training(config, _say)
    return 0


def _check(options: argparse.Namespace) -> int:
    from capo_megatron.assemble import describe
    from capo_megatron.config import load

    config = load(options.target, options.overrides)
    for line in describe(config, options.ranks):
        _say(line)
    return 0


def _sample(options: argparse.Namespace) -> int:
    config = _load(options)
    if _starts_ranks(options):
        return _start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import run_sampling

    run_sampling(config, options.prompt or [], options.problems, options.n, _say)
    return 0


def _eval(options: argparse.Namespace) -> int:
    config = _load(options)
    if _starts_ranks(options):
        return _start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import EvaluationRequest, run_evaluation

    request = EvaluationRequest(
        samples=options.n,
        problems=options.problems,
        base=options.base,
        step=options.step,
        benchmarks=tuple(options.benchmark or ()),
        records=options.output,
    )
    run_evaluation(config, request, _say)
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from capo_megatron.doctor import examine

    report = examine()
    report.print()
    return report.exit_code


# --- targets and ranks ------------------------------------------------------------------------------------------------


def _load(options: argparse.Namespace) -> RunConfig:
    """The config of a YAML file, of a run's folder, or around a Hugging Face directory; checked for these ranks."""
    from capo_megatron.config import load
    from capo_megatron.mcore.runtime import world_size

    if _started_here() or os.environ.get("RANK", "0") != "0":
        logging.getLogger("capo_megatron.config").setLevel(logging.ERROR)  # another process has shown the warnings
    target: Path = options.target
    if (target / "resolved.yaml").is_file():
        config = load(target / "resolved.yaml", options.overrides)
    elif (target / "config.json").is_file():
        given = [f"model.path={target}", f"output=runs/{target.resolve().name}", "eval.every=0", *options.overrides]
        config = load(None, given)
    elif target.is_dir():
        raise ConfigError(
            f"{target}: neither a run (resolved.yaml) nor a Hugging Face model (config.json) is in there."
        )
    else:
        config = load(target, options.overrides)
    config.check(options.nproc or world_size())
    return config


def _starts_ranks(options: argparse.Namespace) -> bool:
    return options.nproc is not None and "RANK" not in os.environ


def _start_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run this command on `count` local ranks under torch's elastic launcher; the exit code of a failed one."""
    if count < 1:
        raise ConfigError(f"--nproc {count}: at least one rank is needed.")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank has said it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
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
        elastic_launch(launch, sys.executable)("-m", "capo_megatron", *_without_nproc(arguments))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return 2 if 2 in codes else next((code for code in codes if code > 0), 1)
    return 0


def _started_here() -> bool:
    """Whether this process is a rank that `_start_ranks` started."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_LAUNCH)


def _without_nproc(arguments: Sequence[str]) -> list[str]:
    kept = list(arguments)
    for index, argument in enumerate(arguments):
        if argument == "--nproc":
            del kept[index : index + 2]
        elif argument.startswith("--nproc="):
            del kept[index]
    return kept


def _say(text: str) -> None:
    print(text, flush=True)


def _first_to_say(message: str) -> bool:
    """Whether no other rank has printed this message: all of them usually find the same mistake."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from torch.distributed import DistStoreError, TCPStore

    key = "capo_megatron/said/" + hashlib.sha256(message.encode()).hexdigest()
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=5)
        )
        return store.add(key, 1) == 1
    except (DistStoreError, RuntimeError, KeyError, ValueError):  # the store is gone or was never there
        return os.environ["RANK"] == "0"
