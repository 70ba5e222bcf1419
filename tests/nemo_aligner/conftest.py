"""Modules in the place of two GPU packages that NeMo-Aligner imports and that a CPU cannot have or does not need."""

import sys
from types import ModuleType

for name, offered in {
    "nemo_aligner.utils.trt_llm": "GPTGenerateTRTLLM",
    "pytriton.client": "FuturesModelClient",
}.items():
    module = ModuleType(name)
    setattr(module, offered, None)
    sys.modules.setdefault(name, module)
sys.modules.setdefault("pytriton", ModuleType("pytriton"))
