"""dLLM-Cache (arXiv 2506.06295): prompt and generation computed anew at intervals of their own, in between the generated rows
whose values changed most."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.cache.sublayers import Partial
from polestar_jax.decode.rows import Picked, picked
from polestar_jax.decode.state import DecodeState
from polestar_jax.errors import InputError
from polestar_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLLMCache(Partial):
    """Between refreshes every layer recomputes a fixed share of the generated rows: those with the lowest cosine of their values
    and the cached ones, equal ones from left to right.

    Attributes:
      prompt_interval, response_interval: see :class:`Partial`.
      rho: the share, rounded down to whole rows.

    Raises:
      InputError: an interval below 1, or a share outside 0..1.
    """

    rho: float

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.rho <= 1:
            raise InputError(f"rho {self.rho} is not accepted: a number >= 0 and <= 1")

    def pick(self, spec: ModelSpec, state: DecodeState, layer: int, moved: jax.Array) -> Picked:
        count = int(self.rho * state.gen_length + 1e-9)  # 0.29 of 100 are 29, which binary fractions miss
        return picked(jnp.ones_like(moved, bool), count, moved)
