"""Items to prompt ids, by prompt mode: the largest hidden difference between published evaluations, so it is always named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from polestar_jax.decode.prompts import check_prompt
from polestar_jax.errors import InputError
from polestar_jax.eval.task import Item
from polestar_jax.spec import ModelSpec
from polestar_jax.tokenization import Tokenizer


def mode_for(items: Sequence[Item], mode: str | None) -> str:
    """The mode asked for; by default turns where items have several, else one user turn."""
    several = any(not isinstance(item.prompt, str) and len(item.prompt) > 1 for item in items)
    if mode == "chat_multiturn" and any(isinstance(item.prompt, str) for item in items):
        raise InputError("--prompt-mode chat_multiturn: the task gives texts, not turns; use chat_single_user")
    return mode or ("chat_multiturn" if several else "chat_single_user")


def prompt_ids(
    items: Sequence[Item], mode: str, tokenizer: Tokenizer | None, spec: ModelSpec, gen_length: int
) -> list[list[int]]:
    """Token ids of every item's prompt, each checked against the model and a generation of ``gen_length``.

    Raises:
      InputError: no tokenizer or start token, or a prompt that cannot be used; names the item.
    """
    if tokenizer is None:
        raise InputError("the model's directory has no tokenizer files, and the task's prompts are texts")
    if mode == "raw_bos" and tokenizer.bos_id is None:
        raise InputError("--prompt-mode raw_bos: the model's tokenizer has no start token; use raw")
    plain = dataclasses.replace(tokenizer, add_bos=mode == "raw_bos") if mode.startswith("raw") else tokenizer
    found = []
    for item in items:
        try:
            if mode == "chat_multiturn":
                ids = plain.encode_chat(item.prompt)
            else:
                ids = plain.encode_prompt(flat(item.prompt), raw=mode.startswith("raw"))
            check_prompt(ids, spec, gen_length)
        except InputError as error:
            raise InputError(f"item {item.id}: {error}") from None
        found.append(ids)
    return found


def flat(prompt: str | Sequence[dict[str, str]]) -> str:
    """Messages as one text: a question, a space and its answer, then a blank line, as few-shot prompts are written."""
    if isinstance(prompt, str):
        return prompt
    text = ""
    for before, message in zip([None, *prompt], prompt, strict=False):
        if before is not None:
            text += " " if message["role"] == "assistant" else "\n\n"
        text += message["content"]
    return text


def digest(ids: Sequence[Sequence[int]]) -> str:
    """16 hexadecimal digits that change with any token of any prompt."""
    return hashlib.sha256(json.dumps([list(map(int, prompt)) for prompt in ids]).encode()).hexdigest()[:16]
