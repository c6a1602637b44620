"""Tokenizer files of a checkpoint directory, read into a backend tokenizer and its settings.

LLaDA ships a complete ``tokenizer.json``. Dream ships ``vocab.json`` and ``merges.txt`` plus a Python class; that class
is Qwen2's byte-level BPE, so the same pipeline is put together here and the class is never looked at.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polestar_jax.errors import InputError
from polestar_jax.jsonfile import load_json

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Every file name :func:`polestar_jax.tokenization.load_tokenizer` may read; a copy of a checkpoint keeps these."""

_PRESENCE = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")

# How Qwen2 cuts text into words before merging. Its merges were learnt on these cuts: they are part of the format.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the files say besides vocabulary and merges.

    Attributes:
      config: ``tokenizer_config.json`` as read, empty where there is none.
      named: role (``bos_token``, ...) to token text.
      added: token id to the token's text and flags as ``tokenizers.AddedToken`` takes them, in id order.
      add_bos: whether raw text gets a start token, or None where the files do not say.
    """

    config: dict[str, Any]
    named: dict[str, str]
    added: dict[int, dict[str, Any]]
    add_bos: bool | None


def has_tokenizer(directory: pathlib.Path) -> bool:
    """Whether the directory holds any tokenizer file, complete or not."""
    return any((directory / name).is_file() for name in _PRESENCE)


def read_settings(directory: pathlib.Path) -> Settings:
    """Settings from ``tokenizer_config.json`` and the older files beside it, which it overrides."""
    return _parse(directory, _read_settings, directory)


def _read_settings(directory: pathlib.Path) -> Settings:
    config = read_json(directory / "tokenizer_config.json")
    merged = read_json(directory / "special_tokens_map.json") | config
    named = {role: _text(merged[role]) for role in _NAMED if merged.get(role) is not None}
    extra = merged.get("additional_special_tokens") or merged.get("extra_special_tokens") or []
    special_texts = {*named.values(), *map(_text, extra.values() if isinstance(extra, dict) else extra)}
    older = {index: text for text, index in read_json(directory / "added_tokens.json").items()}
    added = {}
    for index, entry in [*older.items(), *(config.get("added_tokens_decoder") or {}).items()]:
        text = _text(entry)
        flags = {key: entry[key] for key in _FLAGS if key in entry} if isinstance(entry, dict) else {}
        special = text in special_texts or bool(flags.get("special"))
        added[int(index)] = {"normalized": not special} | flags | {"content": text, "special": special}
    add_bos = config.get("add_bos_token")
    if add_bos not in (None, False, True):
        raise InputError(f"tokenizer_config.json: add_bos_token must be true or false, got {add_bos!r}")
    return Settings(config=config, named=named, added=dict(sorted(added.items())), add_bos=add_bos)


def read_backend(directory: pathlib.Path, settings: Settings) -> tokenizers.Tokenizer:
    """The backend tokenizer with every added token at its declared id.

    Raises:
      InputError: a file is missing or unreadable, or two files give one token (or one id) two meanings.
    """
    import tokenizers

    path = directory / "tokenizer.json"
    if path.is_file():
        # Read here, because the backend takes no path that is not UTF-8.
        backend = _parse(path, lambda: tokenizers.Tokenizer.from_buffer(path.read_bytes()))
    else:
        backend = _byte_level_bpe(directory, {index: token["content"] for index, token in settings.added.items()})
    # A truncation or padding left in the file would change prompts silently; lengths are checked against the model.
    backend.no_truncation()
    backend.no_padding()
    for index, token in settings.added.items():
        backend.add_tokens([_parse(directory, tokenizers.AddedToken, **token)])
        found = backend.token_to_id(token["content"])
        if found != index:
            raise InputError(
                f"{directory}: tokenizer_config.json or added_tokens.json gives token {token['content']!r} id {index}, "
                f"but the vocabulary gives it {found}"
            )
    return backend


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is absent."""
    return load_json(path) if path.is_file() else {}


def _byte_level_bpe(directory: pathlib.Path, added: dict[int, str]) -> tokenizers.Tokenizer:
    """Qwen2's pipeline (NFC, word cuts, byte-level BPE) over ``vocab.json`` and ``merges.txt``."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab_path, merges_path = directory / "vocab.json", directory / "merges.txt"
    missing = [path.name for path in (vocab_path, merges_path) if not path.is_file()]
    if missing:
        raise InputError(f"{directory}: tokenizer files are incomplete: no tokenizer.json and no {', '.join(missing)}")
    vocab, merges = _read_vocab(vocab_path), _parse(merges_path, _read_merges, merges_path)
    # Added tokens join the vocabulary under their own ids: appended afterwards they would take the next free ones.
    texts = {index: text for text, index in vocab.items()}
    for index, text in added.items():
        if texts.setdefault(index, text) != text:
            raise InputError(f"{vocab_path}: id {index} is {texts[index]!r}, but an added token {text!r} claims it")
        vocab.setdefault(text, index)
    backend = Tokenizer(_parse(merges_path, models.BPE, vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_vocab(path: pathlib.Path) -> dict[str, int]:
    vocab = load_json(path)
    for token, index in vocab.items():
        if type(index) is not int or not 0 <= index < 2**32:
            raise InputError(f"{path}: token {token!r} has id {index!r}; expected a whole number in 0..{2**32 - 1}")
    return vocab


def _read_merges(path: pathlib.Path) -> list[tuple[str, str]]:
    """Pairs in the order of their rank: one a line, parted by a space; lines of the version are skipped."""
    lines = path.read_bytes().decode("utf-8").split("\n")
    if not lines[-1]:
        lines.pop()
    merges = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#version"):
            continue
        pair = line.removesuffix("\r").split(" ")
        if len(pair) != 2:
            raise InputError(f"{path}: line {number} is {line!r}; expected two tokens parted by a space")
        merges.append((pair[0], pair[1]))
    return merges


def _parse(path: pathlib.Path, parse: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a parser; whatever it raises (the backend raises bare Exception) becomes one line naming the path."""
    try:
        return parse(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: the tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _text(token: Any) -> str:
    """A token entry's text: entries are plain strings or objects with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise InputError(f"tokenizer_config.json: a token must be text or an object with 'content', got {token!r}")
    return text
