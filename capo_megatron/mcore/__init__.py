"""The only package that imports Megatron-core (`megatron`) or TransformerEngine."""

import importlib
import logging
import sys
import warnings
from functools import partial
from unittest.mock import patch

# Megatron-core warns on import about every optional CUDA library that is absent; `doctor` reports those on request.
warnings.filterwarnings("ignore", module=r"megatron\..*")
# Megatron-core calls collectives by the names they had before torch 2.13, and saves ShardedTensors.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"Please use DTensor instead", category=FutureWarning)

# What 0.19.2 says at every start and nobody here can change.
_KNOWN = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}


def _is_news(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)


for _name, _start in _KNOWN.items():
    logging.getLogger(_name).addFilter(partial(_is_news, _start))

if (_torch := sys.modules.get("torch")) is not None and not _torch.cuda.is_available():
    # Megatron-core lets Inductor compile its fused functions, none of which a CPU calls here: as it imports itself,
    # every rank would wait a second and a half for Inductor. `doctor` comes without torch, and imports neither.
    with patch.object(_torch, "compile", lambda function=None, **_: function or (lambda it: it)):
        importlib.import_module("megatron.core")
