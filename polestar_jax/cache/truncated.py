"""SlowFast's fast passes (arXiv 2506.10848): what lies behind the cycle's end is not attended to."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polestar_jax.cache.base import Wrapping
from polestar_jax.decode.policy import CachePolicy, Wanted
from polestar_jax.decode.state import DecodeState, Pass, Scores
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.schedule.cycles import Cycles
from polestar_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncated(Wrapping):
    """Another policy whose columns from the span's end on are hidden in every fast pass of a cycle but the first.

    They are computed all the same: canvases keep their shape.

    Attributes:
      inside: the policy.
      truncate: whether to hide at all.
    """

    inside: CachePolicy
    truncate: bool = True

    follows: ClassVar = Cycles

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        return self.inside.wants(spec, state)

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Any:
        return self.inside.init(spec, wanted, state, dtype)

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        if self.truncate:
            behind = jnp.arange(state.tokens.shape[1])[None] >= (state.prompt_columns + state.span_end)[:, None]
            hidden = behind & (state.schedule.fast & ~state.entering)[:, None]
            state = state.replace(hidden=hidden if state.hidden is None else hidden | state.hidden)
        return self.inside.forward(model, wanted, state, plan)

    def observe(self, own: Any, scores: Scores, accept: jax.Array, state: DecodeState) -> Any:
        return self.inside.observe(own, scores, accept, state)
