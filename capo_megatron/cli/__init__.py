"""The command line: `capo-megatron train | check | sample | eval | metrics | calibrate | report | plot | ...`.

Exit codes: 0 done; 2 an error that the user can mend (one line on stderr); 1 a bug (traceback); 128 + n ended by signal
n, e.g. 143 after SIGTERM, on which training finishes its step and saves (as on Ctrl-C and on a closed terminal), or 137
if a rank was killed. The same command then continues. This package alone parses arguments and sets exit codes.
Imports are late, so that `--help` and `doctor` answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capo_megatron.cli.arguments import gibibytes, say, starts_ranks, whole_number
from capo_megatron.cli.convert import add_convert
from capo_megatron.cli.evaluation import add_evaluation
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
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return ENDED_BY + signal.SIGPIPE
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
    check.add_argument(
        "--gpu-gib", type=gibibytes, help="memory of each GPU of the run (default: as the GPUs here have, else 80)"
    )

    sample = command("sample", _sample, "sample responses to prompts")
    configured(sample, "CONFIG|RUN|MODEL")
    sample.add_argument("--prompt", action="append", help="a problem's text, before the template (may be repeated)")
    sample.add_argument(
        "--problems", type=whole_number, default=4, help="held-out problems to sample, without --prompt"
    )
    sample.add_argument("--n", type=whole_number, default=1, help="samples per problem")
    sample.add_argument("--base", action="store_true", help="sample from the model before training")
    sample.add_argument("--step", type=int, help="checkpoint to sample from (default: the latest)")

    evaluate = command("eval", _eval, "sample and grade problems; write records and print accuracy and calibration")
    configured(evaluate, "CONFIG|RUN|MODEL")
    evaluate.add_argument("--n", type=whole_number, help="samples per problem (default: eval.samples)")
    evaluate.add_argument(
        "--problems", type=whole_number, help="evaluation problems of a task, or the first ones of the files"
    )
    evaluate.add_argument("--base", action="store_true", help="evaluate the model before training")
    evaluate.add_argument("--step", type=int, help="checkpoint to evaluate (default: the latest)")
    evaluate.add_argument("--benchmark", action="append", help="a problem file to evaluate on (may be repeated)")
    evaluate.add_argument("--output", type=Path, help="records file (default: eval/ in the run's folder)")

    configured(engine := command("engine", _engine, "serve runs with rollout.placement=separate"), "CONFIG")
    engine.add_argument("--listen", default="0.0.0.0:29600", metavar="HOST:PORT", help="default: %(default)s")

    add_convert(commands.add_parser("convert", help=(what := "weights between formats, checked"), description=what))

    add_evaluation(command)
    command("doctor", _doctor, "show versions and devices; exit 2 on a combination known to be bad")
    return parser


# --- commands ---------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    config = _load(options)
    if starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import run_training

    reached = run_training(config, say)
    return 0 if reached >= config.train.steps else ENDED_BY + signal.SIGTERM


def _check(options: argparse.Namespace) -> int:
    config = _load(options)
    from capo_megatron.assemble import describe

    for line in describe(config, options.ranks, options.gpu_gib):
        say(line)
    return 0


def _sample(options: argparse.Namespace) -> int:
    config = _load(options, training=False)
    if starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    from capo_megatron.assemble import SamplingRequest, run_sampling

    request = SamplingRequest(
        questions=tuple(options.prompt or ()),
        problems=options.problems,
        samples=options.n,
        base=options.base or _is_model(options.target),
        step=options.step,
    )
    run_sampling(config, request, say)
    return 0


def _eval(options: argparse.Namespace) -> int:
    config = _load(options, training=False)
    if starts_ranks(options):
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
    run_evaluation(config, request, say)
    return 0


def _engine(options: argparse.Namespace) -> int:
    from capo_megatron.serving import load_alone, run_engine

    config = load_alone(options.target, options.overrides, _ranks(options))
    if starts_ranks(options):
        return start_ranks(options.nproc, options.arguments)
    run_engine(config, options.listen, say)
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
