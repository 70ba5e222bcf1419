"""Where problems come from: files or procedural tasks, templates, tokenizers, and the order of training."""

from capo_megatron.data.dataset import Data, load_data, load_problems
from capo_megatron.data.source import ShuffledSource
from capo_megatron.data.splits import Demonstration
from capo_megatron.data.tasks import Task, make_task, tokenizer_for
from capo_megatron.data.templates import load_template
from capo_megatron.data.tokenizer import check_tokenizer, encode, load_tokenizer, one_token_per_character, stop_ids

__all__ = [
    "Data",
    "Demonstration",
    "ShuffledSource",
    "Task",
    "check_tokenizer",
    "encode",
    "load_data",
    "load_problems",
    "load_template",
    "load_tokenizer",
    "make_task",
    "one_token_per_character",
    "stop_ids",
    "tokenizer_for",
]
