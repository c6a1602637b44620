"""Polestar-Cache: keys and values of every row are kept, and refreshed where clusters of a local window drift (section 4.1).

Four programs, each with a static layout of rows: two ways to enter a block, and a step with or without a refresh. See
``entry`` and ``step`` for what they do.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.cache.base import Cache
from polestar_jax.decode.policy import Plan, Wanted
from polestar_jax.decode.state import DecodeState, Pass
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.polestar import entry, step
from polestar_jax.polestar.presets import SETTINGS
from polestar_jax.polestar.residency import place
from polestar_jax.polestar.residuals import GROUPS
from polestar_jax.polestar.state import PolestarState, empty
from polestar_jax.spec import ModelSpec

FULL, LOCAL, REFRESH, STEP = "full entry", "local entry", "refresh step", "step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolestarCache(Cache):
    """Settings by their names in the paper's Table 5 and the specification.

    Attributes:
      block_length: the longest span that the schedule gives.
      window_prefix, window_suffix: rows of the window before and after the block.
      clusters: K; ``top_clusters``: k, how many of them a layer recomputes at a refresh; ``top_clusters_last`` at the last
        layer (None: the same).
      kmeans_iterations, kmeans: see :func:`polestar_jax.polestar.clusters.cluster`.
      refresh: whether to refresh at all; refresh_step, refresh_cumulative: a step refreshes when the pass before it
        committed more than the one, or those since the last refresh more than the other (None: never by that).
      count_eos: whether committed end-of-text tokens count for that.
      full_period, full_pattern: which blocks are entered with every row: "first", those whose index is a multiple of the
        period; "all_but_last", all others of each period than the last. A period of 1 is every block.
      quantization: format of the stored hidden states, see ``residuals``.
      patch_committed: whether a refresh gives the first layer the new embeddings of window tokens committed in this block.
      score_suffix: whether a refresh scores the suffix rows that the last layer recomputed.
      residency: where stored states stay between passes, see ``residency``.
      packet_capacity: rows computed for the selected clusters where that is enough for them; None: all window rows.

    Raises:
      InputError: settings that do not go together.
    """

    block_length: int
    window_prefix: int
    window_suffix: int
    clusters: int
    top_clusters: int
    top_clusters_last: int | None
    kmeans_iterations: int
    kmeans: str
    refresh: bool
    refresh_step: int | None
    refresh_cumulative: int | None
    count_eos: bool
    full_period: int
    full_pattern: str
    quantization: str
    patch_committed: bool
    score_suffix: bool
    packet_capacity: int | None = None
    residency: str = "device"

    plans = (Plan(FULL), Plan(LOCAL), Plan(REFRESH, also=(STEP,)), Plan(STEP))
    gives = frozenset({"drift"})

    def __post_init__(self):
        for name in SETTINGS.keys() & {field.name for field in dataclasses.fields(self)}:
            SETTINGS[name].check(name, getattr(self, name))
        for name in ("top_clusters", "top_clusters_last"):
            value = getattr(self, name)
            if value is not None and value > self.clusters:
                raise InputError(f"{name}={value} is not accepted: at most clusters={self.clusters}")
        if self.window_prefix + self.window_suffix < 1:
            raise InputError("window_prefix=0 and window_suffix=0 leave no window; for no refreshes set refresh=false")
        if self.packet_capacity is not None and self.packet_capacity > self.window:
            raise InputError(
                f"packet_capacity={self.packet_capacity} is not accepted: at most the window's {self.window} rows"
            )

    @property
    def window(self) -> int:
        """Rows of the window."""
        return self.window_prefix + self.window_suffix

    def top(self, last: bool) -> int:
        """How many clusters a layer recomputes."""
        return self.top_clusters_last if last and self.top_clusters_last is not None else self.top_clusters

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> PolestarState:
        group = GROUPS[self.quantization]
        if spec.d_model % group:
            raise InputError(
                f"quantization={self.quantization} is not accepted for this model: its width {spec.d_model} is no multiple "
                f"of the group of {group}"
            )
        b, n = state.tokens.shape
        return empty(
            spec, batch=b, columns=n, block=self.block_length, window=self.window, clusters=self.clusters,
            form=self.quantization, residency=self.residency, dtype=dtype,
        )  # fmt: skip

    def placed(self, own: PolestarState) -> PolestarState:
        """The pytree with its stored states in the memory that ``residency`` names."""
        layers = (layer._replace(hidden=place(layer.hidden, self.residency)) for layer in own.layers)
        return own._replace(layers=tuple(layers))

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        place = {plan.name: i for i, plan in enumerate(self.plans)}
        phase = state.span_index % self.full_period
        every = self.full_period == 1
        full = (phase == 0) if self.full_pattern == "first" or every else (phase != self.full_period - 1)
        entering = jnp.where(full, place[FULL], place[LOCAL])
        return jnp.where(state.entering, entering, jnp.where(self.due(spec, state)[0], place[REFRESH], place[STEP]))

    def due(self, spec: ModelSpec, state: DecodeState) -> tuple[jax.Array, jax.Array]:
        """Whether the next step refreshes, bool [b], and the tokens committed in the block since the last refresh, i32 [b].

        Tokens of the suffix never count (specification 5.1).
        """
        counted = state.in_span & (state.committed_at == state.nfe[:, None] - 1)
        if not self.count_eos:
            counted = counted & (state.generated != spec.eos_id)
        new = jnp.sum(counted, axis=-1)
        total = state.cache.since_refresh[: new.shape[0]] + new  # under guidance the cache holds every sequence twice
        due = jnp.zeros(new.shape, bool)
        if self.refresh and self.refresh_step is not None:
            due = due | (new > self.refresh_step)
        if self.refresh and self.refresh_cumulative is not None:
            due = due | (total > self.refresh_cumulative)
        return due, total

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        if plan in (FULL, LOCAL):
            return entry.enter(self, model, state, full=plan == FULL)
        return step.advance(self, model, state, refresh=plan == REFRESH)
