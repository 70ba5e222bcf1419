"""The only package that imports Megatron-core (`megatron`) or TransformerEngine."""

import warnings

# Megatron-core warns on import about every optional CUDA library that is absent; `doctor` reports those on request.
warnings.filterwarnings("ignore", module=r"megatron\..*")
