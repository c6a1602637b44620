"""Fast-dLLM's caches (arXiv 2505.22618): keys and values of every row, computed anew when a block is entered.

Inside a block, ``DualCache`` computes the block's rows alone, ``PrefixCache`` those of the block and all after it. What is
computed is written in place before it is attended to, so that these rows see each other as they are now and the rest as it was
at the entry. Settings of the commit rule are in ``commit``: a threshold, a fixed number a pass, or the factor rule.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.cache.base import (
    Cache,
    Cached,
    computed,
    drifted,
    live_rows,
    nothing_cached,
    row_reads,
    span_reads,
    wanted_reads,
)
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.rows import Rows, Run, block_rows, every_row, rows_of
from polestar_jax.decode.state import FULL_ENTRY, STEP, DecodeState, Pass
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec

ENTRY = "entry"
FIRST_TOKENS = ("left_neighbour", "force")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualCache(Cache):
    """Every row at a block's entry, the block's rows inside it.

    Attributes:
      block_length: the longest span that the schedule gives.
      first_token: how a model whose rows score the position after them (Dream) reads a block's first position:
        "left_neighbour": the row before the block is computed with it; "force": as in Fast-dLLM's own Dream decoder, the entry
        decides that position alone, whatever its confidence, and inside the block it is not read again.

    Raises:
      InputError: an unknown first_token.
    """

    block_length: int
    first_token: str = "left_neighbour"

    plans = (Plan(ENTRY), Plan("step"))

    def __post_init__(self):
        if self.first_token not in FIRST_TOKENS:
            raise InputError(f"first_token {self.first_token!r} is not accepted: {' | '.join(FIRST_TOKENS)}")

    @property
    def gives(self) -> frozenset[str]:
        # A block whose first position is not read has no drift there.
        return frozenset() if self.first_token == "force" else frozenset({"drift"})

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Cached:
        return nothing_cached(spec, wanted, state, dtype)

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return jnp.where(state.entering, 0, 1)

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        spec, own = model.spec, state.cache
        shift, entry = spec.logit_shift, plan == ENTRY
        force = bool(shift) and self.first_token == "force"
        rows = every_row(state) if entry else self.inside(state, plan, 0 if force else shift)
        x, layers, q = computed(model, state, own.layers, rows)
        drift, attention = None, own.attention
        if wanted.needs.drift:
            drift, attention = drifted(spec, wanted, state, rows, q, layers[-1].k, attention)
        read, target = self.reads(wanted, state, plan, shift)
        if force:  # the block's first position at its entry, all others after it
            target = jnp.where((target == state.span_start[:, None]) == entry, target, state.gen_length)
        here = jnp.clip(read - rows.columns[:, :1], 0, x.shape[1] - 1)  # of rows that are consecutive
        x = jnp.take_along_axis(x, here[..., None], axis=1)
        kind = jnp.full(state.done.shape, FULL_ENTRY if entry else STEP, jnp.int32)
        full = jnp.full(state.done.shape, entry)
        return Pass(x, target, kind, full, live_rows(rows, state), Cached(layers, attention), drift)

    def reads(self, wanted: Wanted, state: DecodeState, plan: str, shift: int) -> tuple[jax.Array, jax.Array]:
        """Columns that are read and the positions they score."""
        return wanted_reads(wanted, state, shift) if plan == ENTRY else span_reads(wanted, state, shift)

    def inside(self, state: DecodeState, plan: str, shift: int) -> Rows:
        """The rows of a pass inside a block."""
        return block_rows(state, self.block_length, shift)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCache(DualCache):
    """Every row at a block's entry, those of the block and all after it inside.

    The fewer are left the fewer rows there are to compute: of a few static numbers, each half of the one before, the smallest
    that holds them.

    Attributes:
      gen_length: G.
    """

    gen_length: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Generated rows that a pass inside a block may have, the largest first."""
        sizes = [self.gen_length]
        while sizes[-1] // 2 >= self.block_length:
            sizes.append(-(-sizes[-1] // 2))
        return tuple(sizes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        names = [f"last {size}" for size in self.sizes]
        return (Plan(ENTRY), *(Plan(name, also=tuple(names[i + 1 :])) for i, name in enumerate(names)))

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        left = self.gen_length - state.span_start
        smallest = jnp.sum(left[:, None] <= jnp.array(self.sizes)[None], axis=-1)
        return jnp.where(state.entering, 0, smallest)

    def inside(self, state: DecodeState, plan: str, shift: int) -> Rows:
        b, n = state.tokens.shape
        size = int(plan.removeprefix("last ")) + shift
        column = jnp.broadcast_to(n - size + jnp.arange(size)[None], (b, size))
        live = column >= state.prompt_columns + state.span_start[:, None] - shift
        return rows_of((Run(jnp.full(b, n - size, jnp.int32), live),), n)

    def reads(self, wanted: Wanted, state: DecodeState, plan: str, shift: int) -> tuple[jax.Array, jax.Array]:
        if plan == ENTRY or wanted.needs.rows == "span":
            return super().reads(wanted, state, plan, shift)
        rows = self.inside(state, plan, shift)
        return rows.columns, row_reads(rows, state, shift)
