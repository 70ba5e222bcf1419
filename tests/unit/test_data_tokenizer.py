import json
from pathlib import Path

import pytest
from tokenizers import models, pre_tokenizers

from capo_megatron.config import DataConfig, ModelConfig
from capo_megatron.data import check_tokenizer, encode, load_tokenizer, stop_ids, tokenizer_for
from capo_megatron.errors import DataError
from tests.unit.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

CHAIN = DataConfig(task="chain")


def test_the_chain_tokenizer_has_one_token_per_symbol_and_ends_with_a_dollar() -> None:
    tokenizer = tokenizer_for(ModelConfig(), CHAIN)
    assert len(tokenizer) == 17
    (prompt, response) = encode(tokenizer, ["3+8*7?9-0=", "17$"])
    assert prompt == [5, 12, 10, 14, 9, 15, 11, 13, 2, 16]
    assert response == [3, 9, 1]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, stop_ids(tokenizer)) == (0, 1, (1,))
    assert tokenizer.decode([*prompt, *response]) == "3+8*7?9-0=17$"
    assert tokenizer.decode([0, *response], skip_special_tokens=True) == "17"


def test_the_chain_tokenizer_survives_a_hugging_face_directory(tmp_path: Path) -> None:
    made = tokenizer_for(ModelConfig(), CHAIN)
    made.save_pretrained(tmp_path)
    loaded = tokenizer_for(ModelConfig(path=str(tmp_path)), CHAIN)
    assert loaded.get_vocab() == made.get_vocab()
    assert encode(loaded, ["1*2=", "2$"]) == encode(made, ["1*2=", "2$"])
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert loaded.decode([3, 9, 1], skip_special_tokens=True) == "17"
    with pytest.raises(DataError, match="one token per character, and none for 'x'"):
        encode(loaded, ["1*x="])


def test_a_tokenizer_beside_a_qwen2_cuts_texts_by_its_own_rule(tmp_path: Path) -> None:
    made = byte_tokenizer()
    vocabulary = made.get_vocab()
    made.backend_tokenizer.model = models.BPE({**vocabulary, "=Ċ": len(vocabulary)}, [("=", "Ċ")])  # Qwen joins these
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert len(encode(made, ["2=\n"])[0]) == 3
    assert encode(load_tokenizer(tmp_path), ["2=\n"]) == encode(made, ["2=\n"])


def test_encoding_is_not_disturbed_by_earlier_padding_and_truncation() -> None:
    tokenizer = tokenizer_for(ModelConfig(), CHAIN)
    tokenizer(["1+1=", "1"], padding=True, truncation=True, max_length=2)
    assert encode(tokenizer, ["1+1=", "1"]) == [[3, 12, 3, 16], [3]]
    assert encode(tokenizer, []) == []
    tokenizer = byte_tokenizer()
    plain = encode(tokenizer, ["1+1=", "1"])
    tokenizer(["1+1=", "1"], padding=True, truncation=True, max_length=2)
    assert encode(tokenizer, ["1+1=", "1"]) == plain
    assert [len(ids) for ids in plain] == [4, 1]


def test_encoding_equals_the_librarys() -> None:
    for tokenizer, text in ((tokenizer_for(ModelConfig(), CHAIN), "3+8*7?9-0=17$"), (byte_tokenizer(), "a<|im_end|>é")):
        assert encode(tokenizer, [text])[0] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_is_looked_for_at_its_own_path_first_then_beside_the_weights(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    tokenizer_for(ModelConfig(), CHAIN).save_pretrained(tmp_path / "chain")
    bytes_, chain = str(tmp_path / "bytes"), str(tmp_path / "chain")
    assert len(tokenizer_for(ModelConfig(path=chain, tokenizer=bytes_), CHAIN)) == 259
    assert len(tokenizer_for(ModelConfig(path=chain), DataConfig())) == 17
    with pytest.raises(DataError, match=r"not given, no model.path to look in, and one_digit brings none"):
        tokenizer_for(ModelConfig(), DataConfig(task="one_digit"))


def test_a_chat_template_comes_along(tmp_path: Path) -> None:
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == CHAT_TEMPLATE


def test_ids_beyond_the_embedding_are_an_error_that_names_both_sizes() -> None:
    tokenizer = byte_tokenizer()
    check_tokenizer(tokenizer, 259)
    check_tokenizer(tokenizer, 512)  # a padded embedding, as Qwen2.5 has
    with pytest.raises(DataError, match=r"its ids need 259 embedding rows and the model has 258\."):
        check_tokenizer(tokenizer, 258)


def test_chat_models_stop_at_both_turn_ends_whichever_is_end_of_sequence() -> None:
    for eos in ("<|im_end|>", "<|endoftext|>"):
        tokenizer = byte_tokenizer(eos=eos)
        assert stop_ids(tokenizer)[0] == tokenizer.eos_token_id
        assert sorted(stop_ids(tokenizer)) == sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


def test_stop_strings_are_added_if_they_are_single_tokens() -> None:
    tokenizer = byte_tokenizer()
    assert stop_ids(tokenizer, ("\n", "<|im_end|>")) == (*stop_ids(tokenizer), *encode(tokenizer, ["\n"])[0])
    with pytest.raises(DataError, match=r"rollout.stop: 'no' is 2 tokens \[\d+, \d+\] here"):
        stop_ids(tokenizer, ("no",))
    with pytest.raises(DataError, match=r"rollout.stop: '' is 0 tokens"):
        stop_ids(tokenizer, ("",))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        stop_ids(byte_tokenizer(eos=None))


def test_directories_that_hold_no_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent is not a directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match=r"has neither tokenizer.json nor vocab.json"):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_files_are_named(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer.json: damaged or unreadable \(.*\). Copy it again."):
        load_tokenizer(tmp_path)
    file.write_text(whole, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "NoSuchTokenizer"}), encoding="utf-8"
    )
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"/config.json: damaged"):
        load_tokenizer(tmp_path)
