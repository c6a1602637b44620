"""The embedded model's tokenizer: whole words, numbers of one or two digits, single characters as a fall-back."""

from __future__ import annotations

import functools
import json
import pathlib
import string

from polestar_jax.tiny.tasks import LETTERS, NAMES, THINGS

EOS, MASK, BOS, USER, ASSISTANT, UNKNOWN = range(6)
SPECIALS = ("<|endoftext|>", "<|mdm_mask|>", "<|startoftext|>", "<|user|>", "<|assistant|>", "<|unk|>")
# A leading space belongs to the word, number or mark that follows; numbers above 99 fall apart into digits.
PATTERN = r" ?[A-Za-z]+| ?(?<![0-9])[0-9]{1,2}(?![0-9])| ?[0-9]| ?[^\sA-Za-z0-9]+|\s"
WORDS = (
    "copy reverse sort shuffle replace insert remove the list with after from in a random item of what is complete latin "
    "square has buys finds gets more gives loses sells eats to then Then away How many does have now start add subtract "
    "and make Copy Reverse Sort Shuffle Replace Insert Remove What Complete"
).split()
MARKS = ("+", "-", "=", "####", "/", ".", ":", "?", ",", "_")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|> {{ message['content'] | trim }}<|endoftext|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """All tokens in id order, padded with reserved ones to a multiple of 32."""
    tokens = dict.fromkeys(SPECIALS)
    tokens.update(dict.fromkeys([*string.digits, *(f" {n}" for n in range(100))]))
    for piece in (*MARKS, *WORDS, *NAMES, *THINGS):
        tokens.update(dict.fromkeys((piece, " " + piece)))
    tokens.update(dict.fromkeys(" " + letter for letter in LETTERS))
    tokens.update(dict.fromkeys([*map(chr, range(32, 127)), "\n"]))
    for n in range(-len(tokens) % 32):
        tokens[f"<|reserved_{n}|>"] = None
    return tuple(tokens)


def build_tokenizer():
    """A ``tokenizers.Tokenizer``: Unigram, whose best path is the whole piece where it is known, else its characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    hidden = {*SPECIALS, *(token for token in vocabulary() if token.startswith("<|reserved"))}
    scores = [(token, 0.0 if token in hidden else -10.0 if len(token) == 1 else -1.0) for token in vocabulary()]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=UNKNOWN, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    # An answer starts with a space, as every word does; it is not shown.
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def save_tokenizer(directory: pathlib.Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers' PreTrainedTokenizerFast reads them."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
    config = {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in enumerate(SPECIALS)},
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[EOS],
        "unk_token": SPECIALS[UNKNOWN],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
