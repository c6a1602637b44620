"""Dynamic-dLLM's cache update (DCU, arXiv 2606.26120): a window that follows the commits, and more rows where a layer moved."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.cache.sublayers import Partial
from polestar_jax.decode.rows import Picked, picked
from polestar_jax.decode.state import DecodeState
from polestar_jax.errors import InputError
from polestar_jax.spec import ModelSpec

MOST = 4  # a layer's rows outside the window: at most so many times ``layer_budget``


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicCache(Partial):
    """Between refreshes every layer recomputes the window around the last commit and, of the other generated rows, as many as its
    budget says: those whose values moved most, equal ones from left to right.

    The window is moved, not cut, to lie inside the generation; with a logit shift the row before it belongs to it.

    Attributes:
      prompt_interval, response_interval: see :class:`Partial`.
      window_budget: positions of the window, made odd by one more.
      layer_budget: rows outside the window, a layer on average over all but the first.
      budget_scale: s; the layers share the budget by softmax(s d), d how far each one's values moved in the pass before, on
        average over the generation. 0: even shares.

    Raises:
      InputError: an interval or a window below 1, a negative budget or scale.
    """

    window_budget: int
    layer_budget: int
    budget_scale: float

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("window_budget", 1), ("layer_budget", 0), ("budget_scale", 0)):
            if not getattr(self, name) >= least:
                raise InputError(f"{name} {getattr(self, name)} is not accepted: a number >= {least}")

    def pick(self, spec: ModelSpec, state: DecodeState, layer: int, moved: jax.Array) -> Picked:
        g, size = state.gen_length, min(self.window_budget // 2 * 2 + 1, state.gen_length)
        window = self.window(state, size, spec.logit_shift)
        most = picked(
            jnp.ones_like(window),
            min(g, size + spec.logit_shift + MOST * self.layer_budget),
            jnp.where(window, jnp.inf, moved),
        )
        count = jnp.sum(window, axis=-1) + self.budgets(state.cache.moved)[:, layer - 1]
        return most._replace(live=jnp.arange(most.live.shape[1])[None] < count[:, None])

    def window(self, state: DecodeState, size: int, shift: int) -> jax.Array:
        """The window around the last position that the last pass committed, at first the prompt's end; bool [b, G]."""
        index, at = jnp.arange(state.gen_length)[None], state.committed_at
        latest = (at >= 0) & (at == jnp.max(at, axis=-1, keepdims=True))
        centre = jnp.max(jnp.where(latest, index, -1), axis=-1, keepdims=True)
        start = jnp.clip(centre - self.window_budget // 2, 0, state.gen_length - size)
        return (index >= start - shift) & (index < start + size)

    def budgets(self, moved: jax.Array) -> jax.Array:
        """Rows outside the window for each layer but the first, i32 [b, L - 1], from how far they moved, f32 [b, L - 1]."""
        share = jax.nn.softmax(self.budget_scale * moved, axis=-1)
        # Even shares give whole budgets, which rounding would miss.
        return jnp.floor(self.layer_budget * moved.shape[-1] * share + 1e-3).astype(jnp.int32)
