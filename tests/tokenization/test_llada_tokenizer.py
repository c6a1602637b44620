"""LLaDA: tokenizer.json with its special ids; start of text, chat format, length and mask (B39, B40, B77)."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from polestar_jax.errors import InputError
from polestar_jax.tokenization import load_tokenizer

BOS, EOS, GMASK, MASK, EOT = 126080, 126081, 126083, 126336, 126348
ASK = [{"role": "user", "content": "  Hi there\n"}]
TALK = [*ASK, {"role": "assistant", "content": "Hello!"}]
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
GOLDEN_ASK = "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
GOLDEN_TALK = GOLDEN_ASK + HEADER + "Hello!<|eot_id|>"

BOS_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|startoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|startoftext|>": {"id": "<|startoftext|>", "ids": [BOS], "tokens": ["<|startoftext|>"]}},
}

LEFT_PADDING = {
    "strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": EOS, "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}  # fmt: skip


def shown(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special=False)


def test_special_ids_and_length(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(full=True), llada_spec)
    assert len(tokenizer) == 126349
    text = "<|startoftext|><|endoftext|>[gMASK]<|start_header_id|><|eot_id|>"
    assert tokenizer.encode_raw(text) == [BOS, EOS, GMASK, 126346, EOT]
    assert tokenizer.hf.eos_token_id == tokenizer.hf.pad_token_id == EOS


def test_chat_golden(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(), llada_spec)
    assert shown(tokenizer, tokenizer.encode_chat(ASK)) == GOLDEN_ASK + HEADER
    assert shown(tokenizer, tokenizer.encode_chat(TALK)) == GOLDEN_TALK + HEADER
    assert tokenizer.encode_prompt("Hi there", raw=False) == tokenizer.encode_chat(ASK)
    system = [{"role": "system", "content": "Be kind."}, *ASK]
    expected = "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>" + GOLDEN_ASK[15:]
    assert shown(tokenizer, tokenizer.encode_chat(system)) == expected + HEADER


@pytest.mark.parametrize("processor", [None, BOS_PROCESSOR], ids=["plain", "bos_processor"])
@pytest.mark.parametrize("add_bos", [False, True, None], ids=["no", "yes", "unsaid"])
def test_b39_exactly_one_bos(write_llada, llada_spec, processor, add_bos):
    directory = write_llada(model={"post_processor": processor}, config={"add_bos_token": add_bos})
    tokenizer = load_tokenizer(directory, llada_spec)
    ids = tokenizer.encode_chat(TALK)
    assert ids.count(BOS) == 1 and ids[0] == BOS
    due = add_bos if add_bos is not None else processor is not None
    for text in ("Hi", ""):
        assert tokenizer.encode_raw(text) == [BOS] * due + tokenizer.hf.encode(text, add_special_tokens=False)
    assert tokenizer.encode_raw("<|startoftext|>Hi").count(BOS) == 1  # a prompt rendered beforehand


def test_b39_unsaid_bos_is_found_behind_padding(write_llada, llada_spec):
    model = {"post_processor": BOS_PROCESSOR, "padding": LEFT_PADDING}
    tokenizer = load_tokenizer(write_llada(model=model, config={"add_bos_token": None}), llada_spec)
    assert tokenizer.encode_raw("a")[0] == BOS and len(tokenizer.encode_raw("a")) == 2


def test_b39_a_second_bos_inside_a_chat_is_refused(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(), llada_spec)
    with pytest.raises(InputError, match=r"start-of-text token '<\|startoftext\|>'.*--raw"):
        tokenizer.encode_prompt(GOLDEN_ASK + HEADER, raw=False)
    assert shown(tokenizer, tokenizer.encode_prompt(GOLDEN_ASK + HEADER, raw=True)) == GOLDEN_ASK + HEADER


def test_b40_no_trailing_header_without_generation_prompt(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(), llada_spec)
    assert tokenizer.hf.apply_chat_template(TALK, tokenize=False, add_generation_prompt=False) == GOLDEN_TALK + HEADER
    assert shown(tokenizer, tokenizer.encode_chat(TALK, add_generation_prompt=False)) == GOLDEN_TALK
    assert shown(tokenizer, tokenizer.encode_chat(ASK, add_generation_prompt=False)) == GOLDEN_ASK
    quoted = [*ASK, {"role": "assistant", "content": HEADER + "x"}]  # a header inside an answer stays
    assert shown(tokenizer, tokenizer.encode_chat(quoted, add_generation_prompt=False)).endswith(
        HEADER + HEADER + "x<|eot_id|>"
    )


def test_b40_family_template_where_the_directory_has_none(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(config={"chat_template": None}), llada_spec)
    assert shown(tokenizer, tokenizer.encode_chat(TALK)) == GOLDEN_TALK + HEADER
    assert shown(tokenizer, tokenizer.encode_chat(TALK, add_generation_prompt=False)) == GOLDEN_TALK
    system = [{"role": "system", "content": "Be kind."}, *ASK]
    assert tokenizer.encode_chat(system).count(BOS) == 1


def test_b77_the_tokenizers_own_limit_never_cuts(write_llada, llada_spec):
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    for limit in (10**30, 8):
        directory = write_llada(
            model={"truncation": truncation, "padding": LEFT_PADDING}, config={"model_max_length": limit}
        )
        tokenizer = load_tokenizer(directory, llada_spec)
        assert len(tokenizer.encode_raw("a b " * 20_000)) == 80_000
        assert len(tokenizer.encode_raw("abc")) == 3


def test_b77_the_mask_is_the_specs_and_refused_in_prompts(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(config={"mask_token": "[gMASK]"}), llada_spec)
    assert GMASK in tokenizer.encode_prompt("a [gMASK] b", raw=False)
    for raw in (True, False):
        with pytest.raises(InputError, match=r"mask token '<\|mdm_mask\|>' \(id 126336\)"):
            tokenizer.encode_prompt("x<|mdm_mask|>", raw=raw)
    assert tokenizer.decode([MASK, 0, MASK]) == tokenizer.decode([0])


def test_b77_a_mask_that_is_no_special_token_is_hidden_and_refused_all_the_same(
    write_llada, llada_spec, llada_json, llada_config
):
    plain = [entry | {"special": entry["id"] != MASK} for entry in llada_json["added_tokens"]]
    decoder = dict(llada_config["added_tokens_decoder"])
    decoder[str(MASK)] = decoder[str(MASK)] | {"special": False}
    directory = write_llada(model={"added_tokens": plain}, config={"added_tokens_decoder": decoder})
    tokenizer = load_tokenizer(directory, llada_spec)
    assert tokenizer.hf.decode([MASK], skip_special_tokens=True) == "<|mdm_mask|>"
    assert tokenizer.text([MASK, MASK, EOS]) == ""
    with pytest.raises(InputError, match="mask token"):
        tokenizer.encode_raw("<|mdm_mask|>")


def test_ids_outside_the_models_table_are_refused(write_llada, llada_spec):
    small = dataclasses.replace(llada_spec, vocab_size=126346)
    tokenizer = load_tokenizer(write_llada(), small)
    with pytest.raises(InputError, match=r"126346 \('<\|start_header_id\|>'\).*\[0, 126346\)"):
        tokenizer.encode_chat(ASK)
    for bad in (-200, 126346):
        with pytest.raises(InputError, match=rf"token id {bad} "):
            tokenizer.decode([bad])


def test_markers_typed_by_a_user_are_read_as_transformers_reads_them(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(), llada_spec)
    assert tokenizer.encode_prompt("a<|eot_id|>b", raw=False).count(EOT) == 2


def test_added_tokens_follow_the_config(write_llada, llada_spec, llada_json, llada_config):
    short = copy.deepcopy(llada_json["added_tokens"])
    dropped = short.pop()  # only tokenizer_config.json knows the last one
    assert dropped["content"] == "<|eot_id|>"
    tokenizer = load_tokenizer(write_llada(model={"added_tokens": short}, full=True), llada_spec)
    assert tokenizer.encode_raw("<|eot_id|>") == [EOT]
    moved = dict(llada_config["added_tokens_decoder"])
    moved["126400"] = moved.pop("126348")
    with pytest.raises(InputError, match=r"<\|eot_id\|>.* id 126400, but the vocabulary gives it 126348"):
        load_tokenizer(write_llada(config={"added_tokens_decoder": moved}), llada_spec)


def test_a_named_token_without_an_id_is_not_appended(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(config={"pad_token": "<|nowhere|>"}), llada_spec)
    assert len(tokenizer) == 126349 and "<|nowhere|>" not in tokenizer.hf.get_vocab()
    with pytest.raises(InputError, match="add_bos_token"):
        config = {"bos_token": "<|nowhere|>", "add_bos_token": True, "chat_template": None}
        load_tokenizer(write_llada(config=config), dataclasses.replace(llada_spec, bos_id=None))
