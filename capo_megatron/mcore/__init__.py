"""The only package that imports Megatron-core (`megatron`) or TransformerEngine."""

import warnings

# Megatron-core warns on import about every optional CUDA library that is absent; `doctor` reports those on request.
warnings.filterwarnings("ignore", module=r"megatron\..*")
# Megatron-core calls collectives by the names they had before torch 2.13, and saves ShardedTensors.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"Please use DTensor instead", category=FutureWarning)
# Both names work in every supported torch, and Megatron-core uses the old one.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
