"""How many rows a pass puts through each weight, and how many bytes of weights that reads.

Found out by tracing a cache policy's forward pass on shapes alone, with a denoiser that marks what comes through its seams: so
every policy can be counted, and none has to say so itself. Of a conditional the branch with the fewest rows is counted, what
the pass needs where that is enough; a loop's body once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

from pallas_kernels.vocab_scores import VocabScores
from polestar_jax.decode import engine, scoring
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.state import DecodeState
from polestar_jax.models.denoiser import QKV, Block, Denoiser

_MARK = "rows through "


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
    marked = _Marked(model)
    traced = jax.make_jaxpr(lambda state: scoring.forward(marked, decoder, state, plan))(state)
    found = _count(traced.jaxpr)
    layers = range(model.spec.n_layers)
    return Rows(
        embedded=found["embed"],
        projected=tuple(found[f"project {i}"] for i in layers),
        finished=tuple(found[f"finish {i}"] for i in layers),
        scored=found["logits"],
    )


def weight_bytes(model: Denoiser, rows: Rows) -> int:
    """Bytes of weights that a pass over these rows must read at least: all but the embedding table once, and of that its rows."""
    table = model.embedding.get_value()
    every = sum(weight.size * weight.dtype.itemsize for weight in jax.tree.leaves(engine.split(model)[1]))
    return every + (rows.embedded - table.shape[0]) * table.shape[1] * table.dtype.itemsize


def _count(jaxpr: Jaxpr) -> collections.Counter[str]:
    """Rows by what they were marked with."""
    found: collections.Counter[str] = collections.Counter()
    for equation in jaxpr.eqns:
        if str(equation.params.get("name")).startswith(_MARK):
            b, r = equation.outvars[0].aval.shape[:2]
            found[equation.params["name"].removeprefix(_MARK)] += b * r
        parts = [_count(inner) for inner in _inside(equation.params)]
        if equation.primitive.name == "cond":
            parts = [min(parts, key=collections.Counter.total)]
        for part in parts:
            found.update(part)
    return found


def _inside(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, Jaxpr):
                yield inner


def _mark(x: jax.Array, what: str) -> jax.Array:
    return checkpoint_name(x, _MARK + what)


class _MarkedLayer:
    """A layer that marks its rows."""

    def __init__(self, layer: Block, index: int):
        self.layer, self.index = layer, index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def project(self, x: jax.Array) -> QKV:
        return self.layer.project(_mark(x, f"project {self.index}"))

    def project_normed(self, x: jax.Array) -> QKV:
        return self.layer.project_normed(_mark(x, f"project {self.index}"))

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.layer.mlp(_mark(x, f"finish {self.index}"))

    def finish(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        return self.layer.finish(_mark(x, f"finish {self.index}"), heads)


class _Marked:
    """A denoiser that marks its rows."""

    def __init__(self, model: Denoiser):
        self.model = model
        self.layers = [_MarkedLayer(layer, i) for i, layer in enumerate(model.layers)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return _mark(self.model.embed(tokens), "embed")

    def logits(self, x: jax.Array) -> jax.Array:
        return self.model.logits(_mark(x, "logits"))

    def scores(self, x: jax.Array, barred: tuple[int, ...] = ()) -> VocabScores:
        return self.model.scores(_mark(x, "logits"), barred)

    def __call__(self, *inputs: Any) -> jax.Array:
        return Denoiser.__call__(self, *inputs)
