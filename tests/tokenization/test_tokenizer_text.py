"""Behaviour common to both families: messages, odd text, answers shown, images, incomplete directories."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from polestar_jax.errors import InputError
from polestar_jax.tokenization import TOKENIZER_FILES, load_tokenizer

BOS, EOS, MASK, EOT = 126080, 126081, 126336, 126348
USER = {"role": "user", "content": "x"}


@pytest.fixture
def tokenizer(write_llada, llada_spec):
    return load_tokenizer(write_llada(), llada_spec)


def test_b12_answer_is_cut_at_the_first_stop(tokenizer):
    a, b = tokenizer.encode_raw("ab")
    assert tokenizer.text([a, b, EOS, b, EOS]) == "ab"
    assert tokenizer.text([a, EOT, b, EOS]) == "a"
    assert tokenizer.text(np.array([a, MASK, b, EOS], np.int32)) == "ab"  # still being written
    assert tokenizer.text([BOS, a, 126400, b]) == "ab"  # a special token and a row without text
    only_eos = dataclasses.replace(tokenizer.spec, stop_ids=(EOS,))
    assert tokenizer.text([a, EOT, b, EOS, a], only_eos) == "ab"
    assert tokenizer.decode([a, EOS, b], skip_special=False) == "a<|endoftext|>b"


@pytest.mark.parametrize("length", [0, 1, 64])
def test_b12_all_eos_is_an_empty_answer(tokenizer, length):
    assert tokenizer.text([EOS] * length) == ""


def test_answers_keep_their_white_space(tokenizer):
    text = "  x , y .\n do n't\n"
    assert tokenizer.text([*tokenizer.encode_raw(text), EOS]) == text


def test_b43_one_bos_over_all_pieces(write_llada, llada_spec):
    tokenizer = load_tokenizer(write_llada(config={"add_bos_token": True}), llada_spec)
    text = "<image>first <image> second"
    for raw in (False, True):
        pieces = tokenizer.encode_around_images(text, 2, raw=raw)
        flat = [index for ids in pieces for index in ids]
        assert len(pieces) == 3 and flat.count(BOS) == 1 and flat[0] == BOS
        assert min(flat) >= 0 and max(flat) < llada_spec.vocab_size
    raw = tokenizer.encode_around_images(text, 2, raw=True)
    assert [tokenizer.decode(ids, skip_special=False) for ids in raw] == ["<|startoftext|>", "first ", " second"]
    header = "<|start_header_id|>user<|end_header_id|>\n\n"
    chat = tokenizer.decode(tokenizer.encode_around_images(text, 2)[0], skip_special=False)
    assert chat == "<|startoftext|>" + header
    assert tokenizer.encode_around_images("no picture", 0) == [tokenizer.encode_prompt("no picture", raw=False)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_b43_image_count_must_match(tokenizer, count):
    with pytest.raises(InputError, match=rf"2 <image> but {count} images"):
        tokenizer.encode_around_images("<image> and <image>", count)


def test_b43_no_bos_slips_into_a_later_piece(tokenizer):
    for raw in (False, True):
        with pytest.raises(InputError, match="start-of-text"):
            tokenizer.encode_around_images("<image><|startoftext|>", 1, raw=raw)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "at least one"),
        ("hi", "expected a list"),
        ({"role": "user", "content": "x"}, "expected a list"),
        (["hi"], r"messages\[0\]: expected an object"),
        ([{"content": "x"}], r"messages\[0\]: role must be a string, got nothing"),
        ([{"role": "user"}], r"messages\[0\]: content must be a string, got nothing"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]: content must be a string, got list"),
        ([{"role": "user", "content": None}], "content must be a string, got NoneType"),
        ([{"role": 3, "content": "x"}], "role must be a string, got int"),
        ([{"role": " ", "content": "x"}], "role is empty"),
        ([USER, USER | {"name": "n"}], r"messages\[1\]: unknown key 'name'"),
    ],
)
def test_malformed_messages_are_refused(tokenizer, messages, expected):
    with pytest.raises(InputError, match=expected):
        tokenizer.encode_chat(messages)


def test_a_template_that_drops_or_refuses_a_message_is_reported(write_llada, llada_spec):
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(write_llada(config={"chat_template": template}), llada_spec)
    with pytest.raises(InputError, match="does not write messages with role 'system'"):
        tokenizer.encode_chat([{"role": "system", "content": "Be kind."}, USER])
    with pytest.raises(InputError, match="refuses these messages: no tools here"):
        tokenizer.encode_chat([USER, {"role": "tool", "content": "x"}])
    assert tokenizer.encode_chat([USER]) == tokenizer.encode_raw("x")


def test_odd_text(tokenizer):
    for raw in (True, False):
        with pytest.raises(InputError, match=r"lone surrogate U\+D83D"):
            tokenizer.encode_prompt("x \ud83d y", raw)
        for text in ("a\0b", "\u200b\ufeff", "\U0010ffff", "\r\n"):
            kept = text if raw else text.strip()
            assert kept in tokenizer.decode(tokenizer.encode_prompt(text, raw))
    assert tokenizer.encode_raw("") == []
    assert tokenizer.encode_prompt("", raw=False)
    assert len(tokenizer.encode_raw("word " * 100_000)) == 500_000
    with pytest.raises(InputError, match="must be text, got list"):
        tokenizer.encode_raw(["x"])


def test_templates_in_files_of_their_own(write_llada, llada_spec):
    directory = write_llada(config={"chat_template": None})
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "J{{ messages[0].content }}"}))
    tokenizer = load_tokenizer(directory, llada_spec)
    assert tokenizer.decode(tokenizer.encode_chat([USER])) == "Jx"
    (directory / "chat_template.jinja").write_text("F{{ messages[0].content }}")
    tokenizer = load_tokenizer(directory, llada_spec)
    assert tokenizer.decode(tokenizer.encode_chat([USER])) == "Fx"
    assert {"chat_template.jinja", "chat_template.json", "tokenizer.json"} < set(TOKENIZER_FILES)


def test_named_templates(write_llada, llada_spec):
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ messages[0].content }}"}]
    tokenizer = load_tokenizer(write_llada(config={"chat_template": named}), llada_spec)
    assert tokenizer.decode(tokenizer.encode_prompt("x", raw=False)) == "Dx"
    with pytest.raises(InputError, match="one named 'default'"):
        load_tokenizer(write_llada(config={"chat_template": named[:1]}), llada_spec)


def test_no_template_and_no_markers_asks_for_raw(tmp_path, llada_spec):
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "hi": 1}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = load_tokenizer(tmp_path, llada_spec)
    assert tokenizer.encode_prompt("hi", raw=True) == [1]
    with pytest.raises(InputError, match="no chat template: use --raw"):
        tokenizer.encode_prompt("hi", raw=False)


def test_a_small_unigram_tokenizer_with_its_own_template(tmp_path, llada_spec):
    specials = ["<|endoftext|>", "<|mdm_mask|>", "<|startoftext|>", "<|user|>", "<|assistant|>", "<|unk|>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = [*specials, "0", "1", " 12", "a", "b", " ab"]
    words = {"type": "Split", "pattern": {"Regex": " ?[a-z]+| ?[0-9]+"}, "behavior": "Isolated", "invert": False}
    model = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in enumerate(specials)],
        "pre_tokenizer": words,
        "decoder": {"type": "Fuse"},
        "model": {"type": "Unigram", "unk_id": 5, "vocab": [[text, -1.0] for text in tokens]},
    }
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    config = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "add_bos_token": False,
        "model_max_length": 4,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    spec = dataclasses.replace(llada_spec, vocab_size=16, mask_id=1, eos_id=0, bos_id=None, stop_ids=(0,))
    tokenizer = load_tokenizer(tmp_path, spec)
    assert tokenizer.encode_prompt("ab ab 12", raw=False) == [3, 9, 10, 11, 8, 4]
    assert tokenizer.text([11, 8, 1, 0, 9]) == " ab 12" and len(tokenizer) == 12


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path, llada_spec):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path, llada_spec) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": "{}"}, "incomplete: no tokenizer.json and no vocab.json, merges.txt"),
        ({"tokenizer.model": "x"}, "incomplete: no tokenizer.json and no vocab.json, merges.txt"),
        ({"vocab.json": "{}"}, "no tokenizer.json and no merges.txt"),
        ({"tokenizer.json": "{"}, "tokenizer.json: the tokenizer cannot be read"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: the tokenizer cannot be read"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: holds a JSON list, not an object"),
        ({"tokenizer_config.json": "\xff"}, "tokenizer_config.json: no valid JSON"),
        ({"tokenizer_config.json": '{"bos_token": 3}'}, "a token must be text"),
        ({"tokenizer_config.json": '{"add_bos_token": "no"}'}, "add_bos_token must be true or false"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": "y"}}'}, "the tokenizer cannot be read"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"1": {"special": true}}}'}, "object with 'content'"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b\n"}, "merges.txt: the tokenizer cannot be read"),
    ],
)
def test_broken_files_are_named(tmp_path, llada_spec, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=expected):
        load_tokenizer(tmp_path, llada_spec)


def test_importing_costs_nothing_and_loading_prints_nothing(write_llada, llada_spec):
    directory = write_llada()
    code = (
        "import sys, polestar_jax.tokenization as t; from polestar_jax.spec import ModelSpec; import pathlib\n"
        "assert 'transformers' not in sys.modules and 'tokenizers' not in sys.modules\n"
        f"spec = ModelSpec.from_json({llada_spec.to_json()!r})\n"
        f"print(len(t.load_tokenizer(pathlib.Path({str(directory)!r}), spec).encode_prompt('hi', raw=False)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 10


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError"),
        ("{% for i in range(10**9) %}{{ i }}{% endfor %}", "OverflowError"),
        ("{{ 'a'.encode('x') }}", "LookupError"),
        ("{{ raise_exception('line one\nline two') }}", "line one line two"),
    ],
)
def test_a_template_that_fails_is_one_line(write_llada, llada_spec, template, words):
    tokenizer = load_tokenizer(write_llada(config={"chat_template": template}), llada_spec)
    with pytest.raises(InputError, match="the model's chat template") as caught:
        tokenizer.encode_chat([USER])
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["lists", "digits"])
def test_hostile_json_is_named(write_dream, dream_spec, name, text):
    directory = write_dream()
    (directory / name).write_text(text)
    with pytest.raises(InputError, match=f"{name}: no valid JSON"):
        load_tokenizer(directory, dream_spec)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"vocab.json": '{"a": -1}'}, "vocab.json: token 'a' has id -1"),
        ({"vocab.json": '{"a": "0"}'}, "vocab.json: token 'a' has id '0'"),
        ({"merges.txt": "#version: 0.2\nabc\n"}, "merges.txt: line 2 is 'abc'"),
        ({"merges.txt": "a b c\n"}, "merges.txt: line 1 is 'a b c'"),
    ],
)
def test_vocabulary_and_merges_are_checked(write_dream, dream_spec, files, expected):
    directory = write_dream()
    for name, content in files.items():
        (directory / name).write_text(content)
    with pytest.raises(InputError, match=expected):
        load_tokenizer(directory, dream_spec)


def test_vocabulary_and_merges_are_read_as_the_backend_reads_them(write_dream):
    from tokenizers import models

    from polestar_jax.tokenization.files import _read_merges, _read_vocab

    merges = "#version: 0.2\nh e\r\nl l\nll o\nhe llo\n\u0120 w"
    directory = write_dream(merges=merges)
    vocab, pairs = models.BPE.read_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    assert _read_vocab(directory / "vocab.json") == vocab and _read_merges(directory / "merges.txt") == pairs
