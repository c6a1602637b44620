"""What lm-eval's requests ask for, in this project's terms: prompt ids, decoding settings, and the text of an answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from polestar_jax.decode.prompts import check_prompt
from polestar_jax.errors import InputError
from polestar_jax.eval.prompts import prompt_ids
from polestar_jax.eval.task import Item, cut
from polestar_jax.spec import ModelSpec
from polestar_jax.tokenization import Tokenizer

DEFAULT_LENGTH, BLOCK = 256, 32
_SAMPLING = ("temperature", "top_p", "top_k")
_KEYS = ("until", "max_gen_toks", "do_sample", *_SAMPLING)


class Turns(str):
    """Chat messages on their way through lm-eval, as JSON."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one request is decoded: settings of the method, how many tokens an answer may have, and its stop strings."""

    settings: tuple[tuple[str, Any], ...]
    limit: int
    stop: tuple[str, ...]


def plan(kwargs: Mapping[str, Any], *, gen_length: int | None, block_length: int | None) -> Plan:
    """What a request's generation arguments come to.

    Args:
      kwargs: until, max_gen_toks, do_sample, temperature, top_p and top_k, each optional. Without do_sample a temperature above 0
        samples; do_sample alone samples at 1.
      gen_length, block_length: of the model, None where not given. max_gen_toks is rounded up to whole blocks; a
        ``gen_length`` below that holds.

    Raises:
      InputError: an argument that is not known, or a value that is not accepted.
    """
    unknown = sorted(set(kwargs) - set(_KEYS))
    if unknown:
        raise InputError(
            f"gen_kwargs {unknown[0]}={kwargs[unknown[0]]!r} is not accepted; accepted: {', '.join(_KEYS)}"
        )
    given = {name: value for name, value in kwargs.items() if value is not None}
    until = given.get("until", ())
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, (list, tuple)) or not all(isinstance(stop, str) for stop in until):
        raise InputError(f"gen_kwargs until={until!r} is not accepted: a text or a list of texts")
    limit = whole("gen_kwargs max_gen_toks", given["max_gen_toks"]) if "max_gen_toks" in given else None
    length = _length(limit, gen_length, block_length)
    temperature = given.get("temperature", 1.0 if given.get("do_sample") else 0.0)
    settings = {"gen_length": length, "temperature": temperature if given.get("do_sample", True) else 0.0}
    if settings["temperature"]:
        settings |= {name: given[name] for name in ("top_p", "top_k") if name in given}
    return Plan(tuple(settings.items()), limit or length, tuple(stop for stop in until if stop))


def _length(limit: int | None, gen_length: int | None, block_length: int | None) -> int:
    """Positions to decode for an answer of at most ``limit`` tokens."""
    if limit is None and gen_length is not None:
        return gen_length
    most = limit or DEFAULT_LENGTH
    block = block_length or min(BLOCK, most)
    rounded = -(-most // block) * block
    return min(rounded, gen_length or rounded)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Texts to ids and back, under one prompt mode and one way to cut answers (``polestar_jax.eval.choices``)."""

    tokenizer: Tokenizer
    spec: ModelSpec
    prompt_mode: str
    post: str

    def prompts(self, contexts: Sequence[str], gen_length: int) -> list[list[int]]:
        """Prompt ids, each checked with room for ``gen_length`` positions; InputError names the place of one that is refused."""
        items, ends = [], []
        for place, context in enumerate(contexts):
            prompt, end = self._parted(context)
            items.append(Item(id=f"{place + 1} of {len(contexts)}", prompt=prompt, target=None))
            ends.append(self._plain(end))
        found = prompt_ids(items, self.prompt_mode, self.tokenizer, self.spec, gen_length)
        found = [ids + end for ids, end in zip(found, ends, strict=True)]
        for ids in found:
            check_prompt(ids, self.spec, gen_length)
        return found

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Prompt and answer ids of a text whose likelihood is asked for.

        Raw, they are those of the joined text, parted where those of the context end; blanks at the context's end go with the
        continuation, and an empty context is the start token (or the end of text, which stands before a text in training). In a
        chat they are what the template makes of the continuation as the answer, its end apart, without blanks before it.
        """
        if self.prompt_mode.startswith("chat"):
            return self._chat_pair(context, continuation)
        stem = context.rstrip()
        continuation = context[len(stem) :] + continuation
        if not stem:
            start = self.tokenizer.bos_id
            return [self.spec.eos_id if start is None else start], self._plain(continuation)
        prompt, joined = (self.prompts([text], 0)[0] for text in (stem, stem + continuation))
        if len(joined) <= len(prompt):  # the continuation's beginning was drawn into the context's last token
            return prompt, self._plain(continuation)
        return joined[: len(prompt)], joined[len(prompt) :]

    def text(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """The text of an answer's ids."""
        if self.post == "eos_then_stop":
            return cut(self.tokenizer.text(tokens), stop)
        text = cut(self.tokenizer.decode(tokens, skip_special=False), stop)
        return self.tokenizer.decode(self.tokenizer.hf.encode(text, add_special_tokens=False))

    def _parted(self, context: str) -> tuple[str | list[dict[str, str]], str]:
        """A context as a prompt, and the beginning of the answer where the task gives one."""
        if self.prompt_mode != "chat_multiturn":
            return context, ""
        if not isinstance(context, Turns):
            raise InputError("prompt_mode chat_multiturn needs apply_chat_template, which lm-eval was not told")
        turns = json.loads(context)
        return (turns[:-1], turns[-1]["content"]) if turns[-1]["role"] == "assistant" else (turns, "")

    def _chat_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        prompt = self.prompts([context], 0)[0]
        turns, end = self._parted(context)
        if end:
            return prompt, self._plain(continuation)
        answer = continuation.lstrip()
        turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
        ids = self.tokenizer.encode_chat(
            [*turns, {"role": "assistant", "content": answer}], add_generation_prompt=False
        )
        if ids[: len(prompt)] != prompt:  # a template that opens the answer otherwise than it writes one
            return prompt, self._plain(answer)
        ids = ids[len(prompt) :]
        stop = next((place for place, token in enumerate(ids) if token in self.spec.stop_ids), len(ids))
        return prompt, ids[:stop]

    def _plain(self, text: str) -> list[int]:
        """Ids of a text that goes on where others end."""
        return dataclasses.replace(self.tokenizer, add_bos=False).encode_raw(text) if text else []


def whole(name: str, value: Any) -> int:
    """A whole number >= 1, also as text, as lm-eval's command line has it."""
    try:
        number = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
    except ValueError:
        number = 0
    if number < 1:
        raise InputError(f"{name} {value!r} is not accepted: a whole number >= 1")
    return number
