"""What the models of two checkpoints compute on the same tokens: transformers' model, or Megatron-core's."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from capo_megatron.config import ParallelConfig
from capo_megatron.errors import CheckpointError
from capo_megatron.mcore import runtime
from capo_megatron.mcore.hf_weights import load_hf
from capo_megatron.mcore.model import build_model, head_weight
from capo_megatron.weights.checkpoint import Checkpoint


def compare_logits(a: Checkpoint, b: Checkpoint, rows: int = 2, length: int = 32, seed: int = 0) -> tuple[float, float]:
    """The largest difference between the logits of both models on random tokens [rows, length], and the largest logit.

    A Hugging Face directory is loaded by transformers; a Megatron checkpoint into a GPTModel, by this program, for
    Megatron's own loader would unpickle what is in it. One after the other and in float32: 4 bytes per parameter.
    """
    tokens = torch.randint(0, a.shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    one, other = logits(a, tokens), logits(b, tokens)
    gap = (one - other).abs().max()
    if not bool(torch.isfinite(gap)):
        raise CheckpointError(f"{a.folder} or {b.folder}: its logits are NaN or infinite.")
    return float(gap), float(one.abs().max())


@torch.no_grad()
def logits(checkpoint: Checkpoint, tokens: Tensor, device: str = "cpu") -> Tensor:
    """[b, S, V] in float32 on the CPU, from tokens [b, S]; a Megatron checkpoint's model runs on `device`."""
    if checkpoint.kind == "huggingface":
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
        return model(tokens).logits
    ranks = runtime.start(ParallelConfig(), seed=0, device=device)
    try:
        [chunk] = build_model(checkpoint.shape, ranks.layout, torch.float32)
        load_hf([chunk], checkpoint.shape, ranks.layout, checkpoint.checked())
        here = tokens.to(ranks.device)
        positions = torch.arange(here.shape[1], device=ranks.device).expand_as(here)
        hidden = chunk(input_ids=here, position_ids=positions, attention_mask=None)
        return (hidden @ head_weight(chunk).T)[..., : checkpoint.shape.vocab_size].cpu()
    finally:
        ranks.stop()
