"""The decided beginning of an answer while it is being filled in."""

from __future__ import annotations

from typing import Any

from polestar_jax.spec import ModelSpec


class DecidedText:
    """Grows with the run of decided tokens from the start, up to the first end of text.

    Positions are decided in any order; only what has nothing undecided before it is shown, so shown text never changes.
    """

    def __init__(self, tokenizer: Any, spec: ModelSpec):
        self.tokenizer, self.spec, self.text = tokenizer, spec, ""

    def grow(self, tokens: list[int]) -> str:
        """The text that generated ``tokens`` [G] add to what was shown."""
        end = tokens.index(self.spec.mask_id) if self.spec.mask_id in tokens else len(tokens)
        if self.tokenizer is None:
            text = "".join(f"{token}," for token in tokens[:end])
        else:
            text = self.tokenizer.text(tokens[:end], self.spec)
            if end < len(tokens):
                text = text.rstrip("\ufffd")  # half a character: its other bytes come with a later token
        if not text.startswith(self.text):
            return ""
        new, self.text = text[len(self.text) :], text
        return new
