"""What changes while decoding: one pytree, and the values policies hand to the engine.

A canvas is ``[padding | prompt | generation]``: prompts are left-padded to a bucket of p columns, so that the G generated
positions start at one column for every sequence. Generated positions are counted from 0 ("generation coordinates").

Shape letters: b sequences, p prompt columns, G generated positions, n = p + G, r rows, d width, v vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Why a position was committed; also the codes in traces.
CONFIDENCE, FALLBACK, DRIFT, SUFFIX = range(4)
REASONS = ("confidence", "fallback", "drift", "suffix")
NEAR_TIE = 0.01  # difference of probabilities
# What a pass computed; also the codes in traces.
FULL_ENTRY, LOCAL_ENTRY, STEP, REFRESH_STEP = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All that a decode loop carries.

    Attributes:
      tokens: i32 [b, n], the mask id where undecided.
      pad: i32 [b], columns before each prompt; the position of column c is c - pad.
      key: PRNG key [b], one a sequence, so that neighbours in a batch draw the same numbers as alone.
      passes: i32 [], passes of the loop so far.
      nfe, full_forwards, partial_forwards, refreshes: i32 [b], forward passes spent on each sequence.
      rows: f32 [b], rows that those passes computed, a layer (the mean over layers where they differ).
      span_start, span_end: i32 [b], generated positions [start, end) that may be committed now.
      span_index: i32 [b], which block that is.
      span_passes: i32 [b], passes already spent on this span; 0 means the next one enters it.
      span_masks: i32 [b], undecided positions of the span when it was entered.
      committed: i32 [b], positions of the span committed by the last pass.
      reason: i8 [b, G], why each position was committed (see REASONS), -1 while undecided.
      near_ties: i32 [b], positions committed while the two best tokens were within NEAR_TIE of each other: those that
        another device, dtype or kernel may decide differently.
      committed_at: i32 [b, G], the pass (counted a sequence) that committed it, -1 while undecided.
      active: bool [b], takes part in the present pass; the others wait, because they need rows that it does not compute.
      done: bool [b], nothing left to decide, or the logits were not finite.
      finite: bool [b], whether all scores so far were numbers.
      schedule, cache, commit: the policies' own pytrees.
      trace: the recorder's buffers, or None.
      hidden: bool [b, n], columns that nobody attends to in this pass, or None; set by cache policies for those they wrap.
    """

    tokens: jax.Array
    pad: jax.Array
    key: jax.Array
    passes: jax.Array
    nfe: jax.Array
    full_forwards: jax.Array
    partial_forwards: jax.Array
    refreshes: jax.Array
    rows: jax.Array
    span_start: jax.Array
    span_end: jax.Array
    span_index: jax.Array
    span_passes: jax.Array
    span_masks: jax.Array
    committed: jax.Array
    near_ties: jax.Array
    reason: jax.Array
    committed_at: jax.Array
    active: jax.Array
    done: jax.Array
    finite: jax.Array
    schedule: Any = ()
    cache: Any = ()
    commit: Any = ()
    trace: Any = None
    hidden: jax.Array | None = None

    @property
    def gen_length(self) -> int:
        return self.reason.shape[1]

    @property
    def prompt_columns(self) -> int:
        return self.tokens.shape[1] - self.gen_length

    @property
    def generated(self) -> jax.Array:
        """Generated tokens, i32 [b, G]."""
        return self.tokens[:, self.prompt_columns :]

    @property
    def positions(self) -> jax.Array:
        """Position of every column, i32 [b, n]; negative in the padding."""
        return jnp.arange(self.tokens.shape[1])[None] - self.pad[:, None]

    @property
    def valid(self) -> jax.Array:
        """Columns that rows attend to, bool [b, n]: all but the padding and those that are hidden."""
        there = self.positions >= 0
        return there if self.hidden is None else there & ~self.hidden

    @property
    def in_span(self) -> jax.Array:
        """Generated positions of the current span, bool [b, G]."""
        index = jnp.arange(self.gen_length)[None]
        return (index >= self.span_start[:, None]) & (index < self.span_end[:, None])

    def span_targets(self, capacity: int) -> jax.Array:
        """The span's first ``capacity`` positions, i32 [b, capacity]; G where it is shorter."""
        position = self.span_start[:, None] + jnp.arange(capacity)[None]
        return jnp.where(position < self.span_end[:, None], position, self.gen_length)

    @property
    def entering(self) -> jax.Array:
        """Whether the next pass is the first on its span, bool [b]."""
        return self.span_passes == 0

    def pass_key(self, purpose: int) -> jax.Array:
        """Keys [b] for this pass and purpose: they depend on the sequence and its own passes, not on its neighbours."""
        return jax.vmap(lambda key, nfe: jax.random.fold_in(jax.random.fold_in(key, nfe), purpose))(self.key, self.nfe)

    def replace(self, **changes: Any) -> DecodeState:
        return dataclasses.replace(self, **changes)


class Pass(NamedTuple):
    """What a cache policy's forward pass gives the engine.

    Attributes:
      rows: [b, r, d] last-layer hidden states of the rows to score, before the final norm.
      targets: i32 [b, r] the generated position each row scores; G where none.
      kind: i32 [b], what was computed (FULL_ENTRY ... REFRESH_STEP).
      full: bool [b], whether every canvas row was computed.
      computed: i32 or f32 [b], rows of each sequence that a layer computed (the mean where layers differ).
      cache: the policy's new pytree.
      drift: f32 [b, G] how far each position's attention moved since the last pass, NaN where that is not known; None
        from a policy that has no drift.
      attention: f32 [b, n, n] what each row (axis 1) attends to, mean over heads and the layers that are wanted; or None.
      record: arrays for the trace by field name.
    """

    rows: jax.Array
    targets: jax.Array
    kind: jax.Array
    full: jax.Array
    computed: jax.Array
    cache: Any
    drift: jax.Array | None = None
    attention: jax.Array | None = None
    record: dict[str, jax.Array] = {}  # noqa: RUF012 -- never mutated


class Scores(NamedTuple):
    """The model's view of the generated positions after a pass; what a policy does not use, the compiler leaves out.

    Attributes:
      token: i32 [b, G] proposed token.
      confidence: f32 [b, G] its probability; -inf where committing must come last.
      margin: f32 [b, G] probability of the best minus that of the second-best token.
      neg_entropy: f32 [b, G] sum p log p.
      eligible: bool [b, G] undecided, scored, inside the span of a sequence that takes part in the pass.
      ahead: bool [b, G] the same beyond the span: a rule may commit these early, and they are no progress in the span.
      near_tie: bool [b, G] whether the two best tokens were within NEAR_TIE.
      finite: bool [b] whether all scores of the pass are numbers.
      drift, attention: as in :class:`Pass`, or None.
      logits: f32 [b, r, v] of the scored rows, -inf where a token is barred, if the commit rule needs them; else None.
      targets: i32 [b, r] the position that each of these rows scores, G where none.
      canvas: f32 [b, n] the probability of the token that is proposed at each column now, whatever it holds, 0 where no row
        scores it, if the commit rule needs that; else None.
    """

    token: jax.Array
    confidence: jax.Array
    margin: jax.Array
    neg_entropy: jax.Array
    eligible: jax.Array
    ahead: jax.Array
    near_tie: jax.Array
    finite: jax.Array
    drift: jax.Array | None = None
    attention: jax.Array | None = None
    logits: jax.Array | None = None
    targets: jax.Array | None = None
    canvas: jax.Array | None = None

    def within(self, state: DecodeState) -> Scores:
        """The same for another end of the span."""
        seen = self.eligible | self.ahead
        beyond = jnp.arange(state.gen_length)[None] >= state.span_end[:, None]
        return self._replace(eligible=seen & state.in_span, ahead=seen & beyond)


def by_position(values: jax.Array, targets: jax.Array, gen_length: int, fill: float | bool) -> jax.Array:
    """Values [b, r] of rows at the generated positions that they score, [b, G]; ``fill`` elsewhere."""
    empty = jnp.full((values.shape[0], gen_length), fill, values.dtype)
    return empty.at[jnp.arange(values.shape[0])[:, None], targets].set(values, mode="drop")


def kept(active: jax.Array, new: Any, old: Any) -> Any:
    """The pytree ``new`` for the sequences ``active`` bool [b], ``old`` for the others; leaves lead with b."""
    return jax.tree.map(lambda x, y: jnp.where(active.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)
