"""Megatron-core on a machine without CUDA.

Megatron-core writes `device="cuda"`, `torch.cuda.current_device()` and `.cuda()` into its code. Here its modules get
their own `torch`: a copy of the real module's namespace in which "cuda" means the CPU. Nothing outside `megatron.*` can
see that copy, and a call through it costs no more than before: only the factories that take a `device` (`zeros`,
`tensor`, ...) are wrapped. A `TorchFunctionMode` would do the same for every operation of every library in the process.

Two methods of `torch.Tensor` have to be changed for everybody, without harm: `.cuda()` returns the tensor itself, and
`.type()` returns a name that also equals the CUDA name of the type (Megatron's optimizers ask for it).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch

from capo_megatron.errors import ConfigError
from capo_megatron.mcore import versions

CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros", "zeros_like"),
)


class _Namespace(ModuleType):
    """A module with the contents of another one, some of them replaced."""

    def __init__(self, original: ModuleType, **replacements: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)
        self.__dict__.update(replacements)
        # Submodules that are imported after the copy was made.
        self.__dict__["__getattr__"] = functools.partial(getattr, original)


class _Stream:
    """A CUDA stream or event of a device that runs everything in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _TypeName(str):
    """`torch.FloatTensor` that also equals `torch.cuda.FloatTensor`."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _stream_context(_: Any = None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@functools.cache
def _cpu_torch() -> ModuleType:
    stream = _Stream()
    nvtx = _Namespace(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing, mark=_nothing)
    cuda = _Namespace(
        torch.cuda,
        is_available=lambda: False,
        current_device=lambda: CPU,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        Stream=_Stream,
        Event=_Stream,
        stream=_stream_context,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        nvtx=nvtx,
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _Namespace(torch, cuda=cuda, **factories)


def _adopt(module: ModuleType) -> None:
    """Give one Megatron module its `torch`."""
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = _cpu_torch()
    if module.__name__ == "megatron.core.tensor_parallel.random":
        module.__dict__["_get_cuda_rng_state"] = lambda *_, **__: torch.get_rng_state()
        module.__dict__["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)


class _Adopter(MetaPathFinder):
    """Adopts Megatron modules that are imported later."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _adopt(module)


def _type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _TypeName(original(self)) if dtype is None else original(self, dtype, *args, **kwargs)

    return type_of


def _megatron_modules() -> Iterator[ModuleType]:
    return (module for name, module in list(sys.modules.items()) if name.startswith("megatron.") and module)


def installed() -> bool:
    """True once Megatron-core in this process has been put on the CPU."""
    return any(isinstance(finder, _Adopter) for finder in sys.meta_path)


def install() -> None:
    """Make Megatron-core use the CPU in this process. Calling it again does nothing.

    Raises ConfigError for a Megatron-core that was not tested, and on a process that already uses CUDA.
    """
    if installed():
        return
    versions.check()
    if torch.cuda.is_initialized():
        raise ConfigError(
            "device=cpu: this process already uses CUDA. Hide the GPUs with CUDA_VISIBLE_DEVICES= instead."
        )
    sys.meta_path.insert(0, _Adopter())
    for module in _megatron_modules():
        _adopt(module)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.type = _type_name(torch.Tensor.type)  # type: ignore[method-assign]
