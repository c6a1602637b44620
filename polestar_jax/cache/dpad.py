"""DPad (arXiv 2508.14148): within a block only some of the undecided suffix is attended to, the less the farther away."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from polestar_jax.cache.base import Wrapping
from polestar_jax.decode.policy import CachePolicy, Wanted
from polestar_jax.decode.sampling import SUFFIX_NOISE
from polestar_jax.decode.state import DecodeState, Pass, Scores
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


class Dropped(NamedTuple):
    """The columns that the block does not attend to, bool [b, n], and the pytree of the policy inside."""

    hidden: jax.Array
    inside: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuffixDropout(Wrapping):
    """Another policy, with a suffix that is drawn anew at each block's entry: the position j behind the block stays with
    probability min(1, ``suffix_scale`` phi(``suffix_decay`` j / (``suffix_window`` - 1))), phi the standard normal density, and
    those beyond ``suffix_window`` never.

    A column that is dropped is attended to by nobody and keeps its position; it is computed all the same.

    Attributes:
      inside: the policy.
      suffix_scale, suffix_decay, suffix_window: None: 2, 4, 256 for LLaDA, 1.6, 4, 256 for Dream.
    """

    inside: CachePolicy
    suffix_scale: float | None = None
    suffix_decay: float | None = None
    suffix_window: int | None = None

    per_family: ClassVar = {
        "suffix_scale": {"llada": 2.0, "dream": 1.6},
        "suffix_decay": {"llada": 4.0, "dream": 4.0},
        "suffix_window": {"llada": 256, "dream": 256},
    }

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return self.inside.wants(spec, state.replace(cache=state.cache.inside))

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Dropped:
        return Dropped(jnp.zeros(state.tokens.shape, bool), self.inside.init(spec, wanted, state, dtype))

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        drawn = jnp.where(state.entering[:, None], self.drop(state), state.cache.hidden)
        hidden = jnp.where(state.active[:, None], drawn, state.cache.hidden)
        result = self.inside.forward(model, wanted, state.replace(cache=state.cache.inside, hidden=hidden), plan)
        return result._replace(cache=Dropped(hidden, result.cache))

    def observe(self, own: Dropped, scores: Scores, accept: jax.Array, state: DecodeState) -> Dropped:
        return own._replace(inside=self.inside.observe(own.inside, scores, accept, state))

    def drop(self, state: DecodeState) -> jax.Array:
        """The columns to hide for the block that is entered, bool [b, n]."""
        g = state.gen_length
        behind = jnp.arange(g)[None] - state.span_end[:, None]
        z = self.suffix_decay * behind / max(self.suffix_window - 1, 1)
        keep = self.suffix_scale * jnp.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        keep = jnp.where(behind < self.suffix_window, keep, 0.0)
        draw = jax.vmap(lambda key: jax.random.uniform(key, (g,)))(state.pass_key(SUFFIX_NOISE))
        return jnp.pad((behind >= 0) & (draw >= keep), ((0, 0), (state.prompt_columns, 0)))
