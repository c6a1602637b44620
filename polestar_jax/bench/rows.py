"""How many rows a pass puts through each weight, and how many bytes of weights that reads.

Found out by running a cache policy's forward pass on shapes alone, with a denoiser that notes what comes through its seams:
so every policy can be counted, and none has to say so itself. A plan is a static layout of rows; of a conditional, all
branches would be counted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from polestar_jax.decode import engine
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.state import DecodeState
from polestar_jax.models.denoiser import QKV, Block, Denoiser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a pass, those of all sequences of the batch together.

    Attributes:
      embedded: read from the embedding table.
      projected: through q, k and v, layer by layer.
      finished: through the output projection and the MLP, layer by layer.
      scored: through the head.
    """

    embedded: int
    projected: tuple[int, ...]
    finished: tuple[int, ...]
    scored: int


def count_rows(model: Denoiser, decoder: Decoder, state: DecodeState, plan: str) -> Rows:
    """The rows of a pass by the plan of this name on states like ``state``."""
    counted = _Counted(model)
    jax.eval_shape(lambda state: engine._forward(counted, decoder, state, plan), state)
    return Rows(
        embedded=counted.embedded,
        projected=tuple(layer.projected for layer in counted.layers),
        finished=tuple(layer.finished for layer in counted.layers),
        scored=counted.scored,
    )


def weight_bytes(model: Denoiser, rows: Rows) -> int:
    """Bytes of weights that a pass over these rows must read at least: all but the embedding table once, and of that its rows."""
    table = model.embedding.get_value()
    every = sum(weight.size * weight.dtype.itemsize for weight in jax.tree.leaves(engine.split(model)[1]))
    return every + (rows.embedded - table.shape[0]) * table.shape[1] * table.dtype.itemsize


class _CountedLayer:
    """A layer that notes its rows."""

    def __init__(self, layer: Block):
        self.layer, self.projected, self.finished = layer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def project(self, x: jax.Array) -> QKV:
        self.projected += _rows(x)
        return self.layer.project(x)

    def finish(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        self.finished += _rows(x)
        return self.layer.finish(x, heads)


class _Counted:
    """A denoiser that notes its rows."""

    def __init__(self, model: Denoiser):
        self.model, self.embedded, self.scored = model, 0, 0
        self.layers = [_CountedLayer(layer) for layer in model.layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def embed(self, tokens: jax.Array) -> jax.Array:
        self.embedded += _rows(tokens)
        return self.model.embed(tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        self.scored += _rows(x)
        return self.model.logits(x)

    def __call__(self, *inputs: Any) -> jax.Array:
        return Denoiser.__call__(self, *inputs)


def _rows(x: jax.Array) -> int:
    return x.shape[0] * x.shape[1]
