"""One conversion by Megatron-Bridge 0.6.2, on a CPU, for `convert.py --bridge`.

    python tests/bench/convert_bridge.py hf_to_megatron|megatron_to_hf SRC DST CONFIG

Runs in an environment of its own (Python 3.12; `pip install torch==2.13.0`, `pip install --no-deps
megatron-bridge==0.6.2`, `pip install transformers==5.12.1 megatron-core==0.19.2 einops omegaconf hydra-core psutil`).
Bridge imports TransformerEngine, which needs CUDA: names that nobody calls stand in for it, and the model is built of
Megatron-core's own layers. CONFIG is the Hugging Face directory that the model is of. Prints seconds and peak memory.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import time
import types
from pathlib import Path
from typing import Any

import megatron.core.models.gpt  # first: what it finds of TransformerEngine decides which layers it uses
import torch
import torch.distributed as dist

_ABSENT = ("transformer_engine", "transformer_engine_torch", "timm", "wandb", "nvidia_resiliency_ext", "modelopt")


class _Name(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_Name):
    """A class that is named in annotations and base classes only."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        known = name.split(".")[0] in _ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__version__ = "2.20.2"


def main(verb: str, source: str, target: str, config: str) -> None:
    sys.meta_path.append(_Finder())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "2.20.2" if "engine" in name else version(name)
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    from megatron.bridge import AutoBridge
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    began = time.monotonic()
    bridge = AutoBridge.from_hf_pretrained(config)
    provider = bridge.to_megatron_provider(load_weights=verb == "hf_to_megatron")
    provider.transformer_layer_spec = lambda *_, **__: get_gpt_layer_local_spec(normalization="RMSNorm")
    provider.use_cpu_initialization = provider.bf16 = True
    provider.params_dtype = torch.bfloat16
    for name in ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax", "apply_rope"):
        setattr(provider, name + "_fusion", False)
    provider.persist_layer_norm = provider.perform_initialization = False
    provider.finalize()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)
    wanted = chunks[0].sharded_state_dict()
    if verb == "hf_to_megatron":
        Path(target).mkdir()
        dist_checkpointing.save(wanted, target)
    else:
        chunks[0].load_state_dict(dist_checkpointing.load(wanted, source), strict=False)
        bridge.save_hf_pretrained(chunks, target, show_progress=False)
    seconds = time.monotonic() - began
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    print(seconds, peak)


if __name__ == "__main__":
    assert megatron.core is not None
    main(*sys.argv[1:])
