"""FP8 weights with a scale for each block of 128 x 128 numbers, as in checkpoints whose quantisation is called "fp8".

Only the products of the layers are in FP8: embedding, head, norms and biases stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
_FAINTEST = 1e-4  # a block without larger numbers is scaled as if it had one: see `quantise`

# In a config.json. Inputs are quantised as they come, 128 numbers of a token at a time.
SETTINGS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def is_quantised(name: str) -> bool:
    """Whether a weight, by its Hugging Face name, is one of those in FP8."""
    return name.endswith("_proj.weight")


def scale_name(name: str) -> str:
    """What a quantised weight's scales are called: they are what its blocks are multiplied by, not divided."""
    return f"{name}_scale_inv"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """([out, in] float8_e4m3fn, [ceil(out / 128), ceil(in / 128)] float32) of a weight [out, in].

    A block's numbers times its scale are the weight, to 1/16 of a number, or 2**-10 of the scale if that is more.
    Scales are powers of two, from 2**-22: vLLM rounds weights a second time to such scales where DeepGEMM multiplies,
    which then changes nothing. A block with NaN or infinity has the scale NaN: that must not become finite.
    """
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3)).float()
    mantissa, exponent = torch.frexp(largest.clamp_min(_FAINTEST) / LARGEST)
    scale = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    scale = scale.where(largest.isfinite(), torch.nan)
    # Times a power of two a number stays exact, so that it is rounded once.
    values = (blocks * scale.reciprocal().to(weight.dtype)[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.reshape(padded.shape)[:rows, :columns].contiguous(), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """[out, in] float32: what `quantise` has made of a weight."""
    rows, columns = values.shape
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * spread


def quantised(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model as such a checkpoint has them: each in FP8 is followed by its scales."""
    for name, weight in weights:
        if is_quantised(name):
            values, scale = quantise(weight)
            yield name, values
            yield scale_name(name), scale
        else:
            yield name, weight


def rounded(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with what quantisation does to their values, under their own names."""
    for name, weight in weights:
        yield name, dequantise(*quantise(weight)) if is_quantised(name) else weight


def saved_bytes(name: str, size: tuple[int, ...], itemsize: int) -> int:
    """How many fewer bytes a weight of this name and size takes in FP8 than with `itemsize` bytes a number."""
    if not is_quantised(name):
        return 0
    rows, columns = size
    return rows * columns * (itemsize - 1) - 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
