"""Decoding with answers from a table, in plain Python: what commit rules are held against, pass for pass.

The table says what each position answers, given how many positions are decided: ``table[count][position]`` are the logits of
the row at that position. So a rule sees other numbers at every pass, and an oracle needs no transformer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.vocab_scores import VocabScores, vocab_scores
from polestar_jax.decode import engine
from polestar_jax.decode.state import Scores
from polestar_jax.decode.trace import Trace
from polestar_jax.decoders import Decoder
from polestar_jax.spec import ModelSpec
from tests.fakes import MASK, SPEC


class CountModel(nnx.Module):
    """Logits by the number of decided positions and the position: ``table`` [G + 1, positions, v]."""

    def __init__(self, table: np.ndarray, spec: ModelSpec = SPEC):
        self.spec = dataclasses.replace(spec, vocab_size=table.shape[2])
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32)

    def __call__(self, tokens: jax.Array, positions: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        decided = self.table.shape[0] - 1 - jnp.sum(tokens == MASK, axis=-1, keepdims=True)
        return jnp.stack([jnp.broadcast_to(decided, positions.shape), positions], axis=-1).astype(jnp.float32)

    def logits(self, rows: jax.Array) -> jax.Array:
        at = jnp.maximum(rows.astype(jnp.int32), 0)
        return self.table[...][at[..., 0], at[..., 1]]

    def scores(self, rows: jax.Array, barred: tuple[int, ...] = ()) -> VocabScores:
        return vocab_scores(self.logits(rows), barred=barred)


def wandering(seed: int, gen_length: int, *, positions: int = 64, vocab: int = 30, spread: float = 4.0) -> np.ndarray:
    """A table whose answers move from count to count, at some positions much, at others hardly, and now and then anew."""
    rng = np.random.default_rng(seed)
    pace = rng.choice([0.0, 0.01, 0.1, 1.0], size=(positions, 1), p=[0.2, 0.4, 0.2, 0.2])
    tables = [rng.normal(size=(positions, vocab)) * spread * rng.uniform(0.2, 1.5, size=(positions, 1))]
    for _ in range(gen_length):
        step = tables[-1] + pace * rng.normal(size=(positions, vocab))
        new = rng.random((positions, 1)) < 0.05
        tables.append(np.where(new, rng.normal(size=(positions, vocab)) * spread, step))
    return np.stack(tables).astype(np.float32)


@dataclasses.dataclass
class View:
    """What a rule sees of a pass: logits [G, v] without the mask token, probabilities, the proposed tokens and their
    confidences, which positions are undecided, the span, and how many passes were before, on the span and in all."""

    logits: np.ndarray
    tokens: list[int]
    start: int
    end: int
    step: int
    nfe: int

    def __post_init__(self):
        shifted = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        self.p = shifted / shifted.sum(axis=1, keepdims=True)
        self.token, self.confidence = self.p.argmax(axis=1), self.p.max(axis=1)

    @property
    def undecided(self) -> list[int]:
        return [i for i, token in enumerate(self.tokens) if token == MASK]

    @property
    def eligible(self) -> list[int]:
        return [i for i in self.undecided if self.start <= i < self.end]

    def best(self, among: list[int]) -> int:
        """The most confident of these positions, the first of equal ones."""
        return min(among, key=lambda i: (-self.confidence[i], i))


def answers(table: np.ndarray, prompt: int, tokens: list[int], shift: int) -> np.ndarray:
    """The logits [G, v] of the generated positions behind ``prompt`` positions."""
    count = sum(token != MASK for token in tokens)
    rows = table[count, prompt - shift : prompt - shift + len(tokens)].astype(np.float64)
    rows[:, MASK] = -np.inf
    return rows


def by_blocks(
    table: np.ndarray,
    prompt: int,
    gen_length: int,
    block_length: int,
    rule: Callable[[View], list[int]],
    shift: int = 0,
) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens after the pass, positions it committed), pass by pass, block after block."""
    tokens, nfe = [MASK] * gen_length, 0
    for start in range(0, gen_length, block_length):
        step = 0
        while MASK in tokens[start : start + block_length]:
            view = View(answers(table, prompt, tokens, shift), list(tokens), start, start + block_length, step, nfe)
            chosen = sorted(rule(view))
            assert chosen and set(chosen) <= set(view.undecided)
            for i in chosen:
                tokens[i] = int(view.token[i])
            yield list(tokens), chosen
            step, nfe = step + 1, nfe + 1


def passes(model: Any, decoder: Decoder, prompts: list[list[int]]) -> list[list[tuple[list[int], list[int]]]]:
    """The same of the library's decoder, for each prompt of a batch."""
    decoder = decoder.replace(trace=Trace("tokens", "committed"))
    state = engine.decode(model, decoder, engine.init_state(model, decoder, prompts))
    tokens, committed = np.asarray(state.trace["tokens"]), np.asarray(state.trace["committed"])
    return [
        [(tokens[t, b].tolist(), np.flatnonzero(committed[t, b]).tolist()) for t in range(int(state.nfe[b]))]
        for b in range(len(prompts))
    ]


def scores_of(confidence: np.ndarray, eligible: np.ndarray, **more: Any) -> Scores:
    """Scores [b, G] as a rule gets them that goes by the confidence alone."""
    c, open_ = jnp.asarray(confidence, jnp.float32), jnp.asarray(eligible)
    none, every = jnp.zeros_like(open_), jnp.ones(open_.shape[0], bool)
    return Scores(jnp.zeros(c.shape, jnp.int32), c, c, c, open_, none, none, every, **more)
