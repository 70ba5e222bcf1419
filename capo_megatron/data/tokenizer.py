"""Tokenizers: loading, checking, stop tokens, and the one-character-per-token tokenizer of the chain task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from capo_megatron.errors import DataError

# A chat model ends its turn with one of these, whichever of them its tokenizer names as end-of-sequence.
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a Hugging Face directory. Never asks the network. Raises DataError."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"model.tokenizer: {folder} is not a directory. Give a folder with tokenizer.json.")
    names = ("tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json", "vocab.json")
    present = [folder / name for name in names if (folder / name).is_file()]
    if not {"tokenizer.json", "vocab.json"} & {file.name for file in present}:
        raise DataError(f"model.tokenizer: {folder} has neither tokenizer.json nor vocab.json.")
    for file in present:
        _check_json(file)
    # tokenizer.json says all there is to say. Beside a Qwen2's config.json, AutoTokenizer would take its vocabulary
    # alone and cut texts by Qwen's rule, whatever rule stands in the file.
    loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise DataError(f"model.tokenizer: {folder} cannot be loaded ({': '.join(reason) or type(error)}).") from error


def _check_json(file: Path) -> None:
    """A truncated file is found here, by name: the tokenizer library would raise a bare Exception."""
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: damaged or unreadable ({error}). Copy it again.") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise DataError unless every token id has a row in an embedding of `vocab_size` rows.

    An embedding larger than the tokenizer is fine: Qwen2.5 pads 151,665 tokens to 151,936 rows.
    """
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise DataError(
            f"model.tokenizer: its ids need {needed} embedding rows and the model has {vocab_size}. "
            "Use the model's own tokenizer, or raise model.shape.vocab_size."
        )


def stop_ids(tokenizer: PreTrainedTokenizerBase, extra: Sequence[str] = ()) -> tuple[int, ...]:
    """Ids after which sampling ends: end-of-sequence, the chat turn ends the tokenizer knows, and `extra` strings.

    Raises DataError if the tokenizer has no end-of-sequence, or a string is not exactly one token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("model.tokenizer: no end-of-sequence token. Set eos_token in its tokenizer_config.json.")
    added = tokenizer.get_added_vocab()
    ids = [tokenizer.eos_token_id, *(added[token] for token in _TURN_ENDS if token in added)]
    for text in extra:
        pieces = encode(tokenizer, [text])[0]
        if len(pieces) != 1:
            raise DataError(f"rollout.stop: {text!r} is {len(pieces)} tokens {pieces} here. Use strings of one token.")
        ids += pieces
    return tuple(dict.fromkeys(ids))


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text as it stands: no special token is added, since templates write their own.

    Raises DataError if a `character_tokenizer` meets a character that it does not know.
    """
    if not texts:
        return []
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # Straight to the backend: the wrapper costs more than short texts do. It remembers padding of earlier calls.
        backend = tokenizer.backend_tokenizer
        if one_token_per_character(tokenizer):
            return _encode_characters(backend.get_vocab(), texts)
        backend.no_padding()
        backend.no_truncation()
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def one_token_per_character(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it is a `character_tokenizer`, which cannot write words."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    cut = tokenizer.backend_tokenizer.pre_tokenizer
    return isinstance(cut, pre_tokenizers.FixedLength) and cut.length == 1


def _encode_characters(vocabulary: dict[str, int], texts: Sequence[str]) -> list[list[int]]:
    """One look-up per character: ten times faster again, which the thousands of small batches of a warm-up feel."""
    try:
        return [[vocabulary[character] for character in text] for text in texts]
    except KeyError as error:
        raise DataError(f"model.tokenizer: it has one token per character, and none for {error}.") from error


def character_tokenizer(characters: str, eos: str, pad: str) -> PreTrainedTokenizerBase:
    """A tokenizer with one token per character: `pad` is 0, `eos` is 1, then `characters` in order.

    Saves to and loads from a Hugging Face directory. Decoding with skip_special_tokens drops `eos` and `pad`. It has no
    unknown token: `encode` refuses other characters.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(dict.fromkeys(pad + eos + characters))}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.FixedLength(1)
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
