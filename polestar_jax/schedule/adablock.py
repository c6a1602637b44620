"""AdaBlock-dLLM's schedule (arXiv 2509.26432): a block ends where its entry predicts a delimiter, such as a new line."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from polestar_jax.decode.policy import Span
from polestar_jax.decode.state import DecodeState, Scores
from polestar_jax.errors import InputError
from polestar_jax.schedule.blocks import Spans
from polestar_jax.spec import ModelSpec
from polestar_jax.tokenization import Tokenizer

# Of the published models, by family: the id of the mask token tells them, the ids are those of the authors' code.
PUBLISHED = {
    ("llada", 126336): (198,),
    ("dream", 151666): (
        198, 271, 280, 319, 340, 382, 401, 532, 624, 630, 692, 698, 921, 1248, 1837, 1939, 2219, 2533, 3276, 3876, 4894, 5267,
        14750, 68327,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaBlock(Spans):
    """The next block ends behind the most confident delimiter among the first quarter of the generation's length of positions
    that its entry scores, if it is confident enough; else it has ``block_length`` positions.

    Attributes:
      gen_length: G.
      block_length: of a block without a confident delimiter.
      delimiter_threshold: the least confidence of a delimiter; None: 0.3 for LLaDA, 0.5 for Dream.
      delimiters: token ids; None: the published ones of a published model, else those of the tokenizer's tokens that hold a new
        line.
    """

    gen_length: int
    block_length: int
    delimiter_threshold: float | None = None
    delimiters: tuple[int, ...] | None = None

    per_family: ClassVar = {"delimiter_threshold": {"llada": 0.3, "dream": 0.5}}

    @property
    def search(self) -> int:
        """Positions among which a delimiter is looked for."""
        return self.gen_length // 4

    @property
    def capacity(self) -> int:
        return max(self.block_length, self.search)

    def most(self, gen_length: int) -> int:
        return gen_length

    def for_tokens(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> AdaBlock:
        """The same with the ids of a model's delimiters where it has none."""
        ids = self.delimiters
        if ids is None:
            ids = PUBLISHED.get((spec.family, spec.mask_id))
        if ids is None and tokenizer is not None:
            ids = tokenizer.ids_containing("\n")
            if not ids:
                raise InputError(
                    "setting delimiters: the tokenizer has no token with a new line; give token ids, such as 13,14"
                )
        return dataclasses.replace(self, delimiters=ids)

    def next(self, undecided: jax.Array, last: jax.Array) -> Span:
        start = jnp.argmax(undecided, axis=-1).astype(jnp.int32)
        return Span(start, jnp.minimum(start + self.capacity, self.gen_length), last + 1)

    def fit(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, tuple]:
        if self.delimiters is None:
            raise InputError("schedule AdaBlock knows no delimiters: give delimiters=... or decode with a tokenizer")
        start = state.span_start[:, None]
        offset = jnp.arange(self.gen_length)[None] - start
        seen = (scores.eligible | scores.ahead) & (offset >= 0) & (offset < self.search)
        found = seen & jnp.isin(scores.token, jnp.array(self.delimiters, jnp.int32))
        confidence = jnp.where(found, scores.confidence, -jnp.inf)
        best = jnp.argmax(confidence, axis=-1).astype(jnp.int32)  # the first of equal ones
        sure = jnp.max(confidence, axis=-1) >= self.delimiter_threshold
        plain = jnp.minimum(state.span_start + self.block_length, self.gen_length)
        return jnp.where(state.entering, jnp.where(sure, best + 1, plain), state.span_end), ()
