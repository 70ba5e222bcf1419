"""vLLM's share of a GPU is held against what the trainer keeps there at the same moment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from capo_megatron import assemble
from capo_megatron.cli import main
from capo_megatron.config import ParallelConfig, RolloutConfig, TrainConfig, VllmConfig
from capo_megatron.errors import ConfigError
from capo_megatron.mcore import memory
from capo_megatron.mcore.memory import GIB, Plan, check_vllm, describe_vllm
from capo_megatron.mcore.runtime import Layout
from capo_megatron.rollout import vllm
from capo_megatron.weights.shape import ModelShape

SHAPE = ModelShape(152064, 3584, 28, 28, 4, 18944, max_position_embeddings=4096)  # of Qwen2.5-Math-7B
CONFIG = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")


def plan(fraction: float = 0.4, tensor: int = 2, ranks: int = 8, **options: Any) -> Plan:
    rollout = RolloutConfig(engine="vllm", vllm=VllmConfig(tensor=tensor, memory_fraction=fraction), **options)
    layout = Layout.of(ParallelConfig(tensor=2, sequence=True), ranks)
    return Plan.of(SHAPE, layout, torch.bfloat16, TrainConfig(recompute="full"), rollout, 4096, True)


def test_the_share_is_counted_in_tokens_and_sequences() -> None:
    found = plan()
    check_vllm(found, 80 * GIB)
    weights = 7_615_616_512 * 2 // 2
    per_token = 2 * 28 * 4 * 128 * 2 // 2  # key and value, layers, heads, numbers, bytes; cut in two
    tokens = (32 * GIB - weights) // per_token
    lines = describe_vllm(found, 80 * GIB)
    assert lines[0].startswith("vLLM           32.00 GiB  of a GPU of 80.00 GiB (rollout.vllm.memory_fraction=0.4)")
    assert f"for keys and values of {tokens:,} tokens: {tokens // 4096:,} sequences of 4,096" in lines[1]
    resident = sum(found.model.values())
    assert f"{80 - 32 - resident / GIB:.2f} GiB  left for CUDA" in lines[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"fraction": 0.05},
            r"4\.00 GiB of a GPU of 80\.00 GiB; its weights take 7\.09 GiB.* Use 0\.1 to 0\.6\.$",
        ),
        (
            {"fraction": 0.7},
            r"beside it the trainer keeps 31\.92 GiB of weights, gradients, optimizer\. Use 0\.1 to 0\.6\.$",
        ),
        ({"fraction": 0.6, "async_steps": 1}, r"gradients, optimizer, activations and logits\. Use 0\.1 to 0\.\d+\.$"),
        (
            {"fraction": 0.3, "ranks": 2, "tensor": 1, "async_steps": 1},
            r"No fraction fits: raise rollout\.vllm\.tensor or",
        ),
    ],
    ids=["too small", "too large", "one step ahead", "impossible"],
)
def test_what_cannot_fit_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.vllm\.memory_fraction=\S+: vLLM takes .*{message}") as error:
        check_vllm(plan(**given), 80 * GIB)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{}, {"async_steps": 1}, {"tensor": 1}, {"ranks": 64}])
def test_the_fractions_that_it_names_are_accepted(given: dict[str, Any]) -> None:
    for wrong in (0.01, 0.99):
        with pytest.raises(ConfigError, match=r"Use (\S+) to (\S+)\.$") as error:
            check_vllm(plan(wrong, **given), 80 * GIB)
        bounds = re.search(r"Use (\S+) to (\S+)\.$", str(error.value))
        assert bounds is not None
        for fraction in map(float, bounds.groups()):
            check_vllm(plan(fraction, **given), 80 * GIB)


def test_check_takes_the_gpus_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["check", CONFIG, "rollout.engine=vllm"]
    for flags, size in (([], "80.00"), (["--gpu-gib", "24"], "24.00"), (["--gpu-gib=141.5"], "141.50")):
        assert main([*asked, *flags]) == 0
        assert f"of a GPU of {size} GiB" in capsys.readouterr().out
    monkeypatch.setattr(assemble, "gpu_here", lambda: 16 * GIB)
    assert main(asked) == 0
    assert "of a GPU of 16.00 GiB" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--gpu-gib", "0"])
    assert "expected a number of GiB from 1 to 4,096" in capsys.readouterr().err
    assert main(["check", CONFIG, "--gpu-gib", "24"]) == 0
    assert "vLLM" not in capsys.readouterr().out, "the transformers engine takes what it needs"


def test_vllm_for_cpus_has_a_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm, "is_for_cpus", lambda: True)
    monkeypatch.setattr(assemble, "gpu_here", lambda: None)
    assert main(["check", CONFIG, "rollout.engine=vllm", "rollout.vllm.cpu_cache_gib=2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"vLLM +2\.00 GiB  on a CPU \(rollout\.vllm\.cpu_cache_gib\), for keys and values of [\d,]+ tok", shown
    )
    assert "of a GPU" not in shown


def test_train_asks_the_gpu_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capo_megatron.config import load

    monkeypatch.setattr(assemble, "gpu_here", lambda: GIB // 1024)
    monkeypatch.setattr(vllm, "check_installed", lambda: None)
    config = load(CONFIG, [f"output={tmp_path / 'run'}", "rollout.engine=vllm"])
    with pytest.raises(
        ConfigError, match=r"^rollout\.vllm\.memory_fraction=0\.5: vLLM takes 0\.50 MiB of a GPU of 1\.00"
    ):
        assemble.run_training(config, lambda _: None)
    assert not list(tmp_path.iterdir())


def test_the_smallest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        def __init__(self, size: int) -> None:
            self.total_memory = size

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties([80, 40][index]))
    assert memory.gpu_here() == 40
