"""What dLLM-Cache and Dynamic-dLLM have in common: each layer recomputes some rows and adds to the others what it added before.

Prompt and generation are kept apart, each with an interval after which it is computed anew. Between refreshes every layer but
the first projects all generated rows, compares their values with the cached ones, and recomputes those that a policy picks by
that; the residual stream of the generation is kept at full width, so that every position is scored. The first layer computes all
generated rows. Nothing reads the prompt's rows between two refreshes, so they are not computed. With a logit shift the last
prompt row scores the first generated position: it is computed with the generation, in every pass and layer.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import attend
from polestar_jax.cache.base import Cache, every_read, live_rows, span_reads
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.rows import KEYS, VALUES, Picked, Rows, Run, rows_of
from polestar_jax.decode.state import FULL_ENTRY, REFRESH_STEP, STEP, DecodeState, Pass, kept
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import QKV, Block, Denoiser
from polestar_jax.spec import ModelSpec

FULL, PROMPT, RESPONSE, PART = "full", "prompt", "response", "step"


class Sublayers(NamedTuple):
    """One layer's keys [b, g, n, e], before rotation, and values [b, g, e, n] of every column; and what its attention and MLP
    together added to the generated rows, [b, G, d], None for the first layer. All in the model's dtype."""

    k: jax.Array
    v: jax.Array
    added: jax.Array | None


class Stream(NamedTuple):
    """What is kept between passes: the layers, and how far the values of the generated rows moved in the last pass, f32
    [b, L - 1]: the mean of 1 - cosine at each layer but the first, 0 before there is anything to compare with."""

    layers: tuple[Sublayers, ...]
    moved: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partial(Cache, abc.ABC):
    """A policy that recomputes picked rows; :meth:`pick` says which.

    Attributes:
      prompt_interval, response_interval: the first pass, and every so many passes another, computes all of the prompt, and of
        the generation; None: the first alone.

    Raises:
      InputError: an interval below 1.
    """

    prompt_interval: int | None
    response_interval: int | None

    gives = frozenset({"every"})

    def __post_init__(self):
        for name in ("prompt_interval", "response_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} {value!r} is not accepted: a whole number >= 1, or None")

    @abc.abstractmethod
    def pick(self, spec: ModelSpec, state: DecodeState, layer: int, moved: jax.Array) -> Picked:
        """The generated rows that a layer recomputes, from 1 - cosine of their values and the cached ones, f32 [b, G]."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        prompt, response = self.prompt_interval, self.response_interval
        alone = lambda this, other: this is not None and (other is None or this % other > 0)  # noqa: E731
        there = {
            FULL: True,
            PROMPT: alone(prompt, response),
            RESPONSE: alone(response, prompt),
            PART: 1 not in (prompt, response),
        }
        return tuple(Plan(name) for name, possible in there.items() if possible)

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        place = {plan.name: i for i, plan in enumerate(self.plans)}
        prompt, response = (
            state.nfe % interval == 0 if interval else state.nfe == 0
            for interval in (self.prompt_interval, self.response_interval)
        )
        at = lambda name: place.get(name, 0)  # noqa: E731
        return jnp.where(prompt, jnp.where(response, at(FULL), at(PROMPT)), jnp.where(response, at(RESPONSE), at(PART)))

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Stream:
        b, n = state.tokens.shape
        g, e = spec.n_kv_heads, spec.head_dim
        empty = lambda *shape: jnp.zeros((b, *shape), dtype)  # noqa: E731
        layers = (
            Sublayers(empty(g, n, e), empty(g, e, n), empty(state.gen_length, spec.d_model) if i else None)
            for i in range(spec.n_layers)
        )
        return Stream(tuple(layers), jnp.zeros((b, spec.n_layers - 1), jnp.float32))

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        spec, own, g = model.spec, state.cache, state.gen_length
        rows, always = _rows(state, plan, spec.logit_shift)
        x, layers, moves, counts = model.embed(rows.take(state.tokens)), [], [], []
        for i, (layer, old) in enumerate(zip(model.layers, own.layers, strict=True)):
            projected = layer.project(x)
            chosen = None
            if i:
                moved = distance(projected.v[:, -g:], old.v[..., -g:])
                moves.append(jnp.mean(moved, axis=-1))
                chosen = self.pick(spec, state, i, moved) if always < rows.live.shape[1] else None
            x, new, count = _through(model, layer, state, old, x, projected, rows, always, chosen)
            layers.append(new)
            counts.append(count)
        first = (state.nfe == 0)[:, None]
        moved = jnp.stack(moves, axis=-1) if moves else own.moved
        moved = kept(state.active, jnp.where(first, 0.0, moved), own.moved)
        x, target = _reads(x[:, -g - spec.logit_shift :], wanted, state, spec.logit_shift)
        kind = STEP if plan == PART else jnp.where(first[:, 0], FULL_ENTRY, REFRESH_STEP)
        kind, full = (jnp.broadcast_to(value, state.done.shape) for value in (kind, plan == FULL))
        return Pass(x, target, kind, full, sum(counts) / len(counts), Stream(tuple(layers), moved))


def distance(new: jax.Array, old: jax.Array) -> jax.Array:
    """1 - cosine of values [b, G, g, e] and cached ones [b, g, e, G], all heads together, f32 [b, G]."""
    b, count = new.shape[:2]
    pair = (each.reshape(b, count, -1).astype(jnp.float32) for each in (new, jnp.moveaxis(old, 3, 1)))
    new, old = (each / jnp.maximum(jnp.linalg.norm(each, axis=-1, keepdims=True), 1e-12) for each in pair)
    # Half the squared chord: 1 - cosine itself would lose the small distances to rounding.
    return 0.5 * jnp.sum((new - old) ** 2, axis=-1)


def _rows(state: DecodeState, plan: str, shift: int) -> tuple[Rows, int]:
    """The rows that a plan projects, up to the canvas' end, and how many of them, at the front, every layer computes."""
    b, n = state.tokens.shape
    first = 0 if plan in (FULL, PROMPT) else state.prompt_columns - shift
    rows = rows_of((Run(jnp.full(b, first, jnp.int32), jnp.ones((b, n - first), bool)),), n)
    return rows, n - first if plan in (FULL, RESPONSE) else state.prompt_columns - first


def _reads(x: jax.Array, wanted: Wanted, state: DecodeState, shift: int) -> tuple[jax.Array, jax.Array]:
    """The rows to score and their positions, from the states [b, G + shift, d] of the rows from the first scoring one on."""
    if wanted.needs.rows != "span":
        return x[:, : state.gen_length], every_read(state, shift)[1]
    column, target = span_reads(wanted, state, shift)
    here = column - state.prompt_columns + shift
    return jnp.take_along_axis(x, here[..., None], axis=1), target


def _through(
    model: Denoiser, layer: Block, state: DecodeState, old: Sublayers, x: jax.Array, projected: QKV, rows: Rows, always: int,
    chosen: Picked | None,
) -> tuple[jax.Array, Sublayers, jax.Array]:  # fmt: skip
    """A layer: (its output for ``rows`` [b, r, d], what it keeps, how many rows it computed, i32 [b]).

    It computes the first ``always`` rows and those ``chosen`` of the generation, which are the last; None: all rows.
    """
    (b, r), g = rows.live.shape, state.gen_length
    active = state.active[:, None]
    v = rows.write(old.v, projected.v, jnp.broadcast_to(active, (b, r)), VALUES)
    if chosen is None:
        x, k, added = _computed(model, layer, state, old.k, v, x, projected, rows)
        added = None if old.added is None else jnp.where(active[..., None], added[:, -g:], old.added)
        return x, Sublayers(k, v, added), live_rows(rows, state)
    here = jnp.concatenate([jnp.broadcast_to(jnp.arange(always), (b, always)), r - g + chosen.columns], axis=1)
    live = jnp.concatenate([jnp.ones((b, always), bool), chosen.live], axis=1)
    if not here.shape[1]:
        return x + old.added, old._replace(v=v), jnp.zeros(b, jnp.int32)
    take = lambda values: values[jnp.arange(b)[:, None], here]  # noqa: E731
    some = Picked(take(rows.columns), live)
    out, k, added = _computed(model, layer, state, old.k, v, take(x), QKV(*map(take, projected)), some)
    column = jnp.where(chosen.live & active, chosen.columns, g)  # outside: dropped
    added = old.added.at[jnp.arange(b)[:, None], column].set(added[:, always:], mode="drop")
    x = jnp.concatenate([out[:, :always], x[:, -g:] + added], axis=1)
    return x, Sublayers(k, v, added), live_rows(some, state)


def _computed(
    model: Denoiser, layer: Block, state: DecodeState, k: jax.Array, v: jax.Array, x: jax.Array, projected: QKV,
    rows: Rows | Picked,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """A layer's output for some rows, the keys with theirs, and what attention and MLP together added to them."""
    k = rows.write(k, projected.k, jnp.broadcast_to(state.active[:, None], rows.live.shape), KEYS)
    heads = attend(
        projected.q, k, v, q_positions=rows.take(state.positions), k_positions=state.positions,
        theta=model.spec.rope_theta, valid=state.valid,
    )  # fmt: skip
    attention = layer.attention_output(heads)
    x = lax.optimization_barrier(x + attention)
    mlp = lax.optimization_barrier(layer.mlp(x))
    return x + mlp, k, attention + mlp
