"""One forward pass by the cache policy, and from its rows to what commit rules see."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polestar_jax.decode.policy import Decoder, Needs
from polestar_jax.decode.sampling import TOKEN_NOISE, RowScores, barred_logits, best_rows, score_rows
from polestar_jax.decode.state import NEAR_TIE, DecodeState, Pass, Scores, by_position
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


def forward(model: Denoiser, decoder: Decoder, state: DecodeState, plan: str) -> tuple[Pass, Scores]:
    """The cache policy's pass, without its guidance half, and the scores of what it computed."""
    spec, b = model.spec, state.done.shape[0]
    result = decoder.cache.forward(model, decoder.wanted, guided(state, decoder, spec), plan)
    sampling, needs = decoder.sampling, decoder.wanted.needs
    if not (decoder.guidance or sampling.needs_logits or needs.logits):
        rows = best_rows(model.scores(result.rows, sampling.barred(spec)), sampling, spec)
        return result, _scores(rows, result, state, spec, needs)
    logits = model.logits(result.rows)
    if decoder.guidance:
        conditional, unconditional = jnp.split(logits, 2)
        logits = unconditional + (decoder.guidance + 1) * (conditional - unconditional)
        rows = result.computed[:b] + result.computed[b:]
        result = jax.tree.map(lambda x: x[:b], result._replace(cache=None))._replace(cache=result.cache, computed=rows)
    scores = _scores(score_rows(logits, sampling, spec, state.pass_key(TOKEN_NOISE)), result, state, spec, needs)
    if needs.logits:
        scores = scores._replace(logits=barred_logits(logits, sampling, spec), targets=result.targets)
    return result, scores


def guided(state: DecodeState, decoder: Decoder, spec: ModelSpec) -> DecodeState:
    """What the forward pass sees: with guidance, every sequence twice, the second time with its prompt masked."""
    if not decoder.guidance:
        return state
    column = jnp.arange(state.tokens.shape[1])[None]
    prompt = (column >= state.pad[:, None]) & (column < state.prompt_columns)
    masked = jnp.where(prompt, spec.mask_id, state.tokens)
    cache, trace = state.cache, state.trace
    twice = jax.tree.map(
        lambda x: jnp.concatenate([x, x]) if x.ndim else x, state.replace(cache=(), trace=None, commit=())
    )
    return twice.replace(tokens=jnp.concatenate([state.tokens, masked]), cache=cache, trace=trace)


def doubled(decoder: Decoder, values: Any) -> Any:
    """A pytree by sequence, every sequence twice under guidance, as the cache policy sees them."""
    return jax.tree.map(lambda x: jnp.concatenate([x, x]), values) if decoder.guidance else values


def _scores(rows: RowScores, result: Pass, state: DecodeState, spec: ModelSpec, needs: Needs) -> Scores:
    """Scatter row scores [b, r] to generated positions [b, G]."""
    g, targets = state.gen_length, result.targets
    put = lambda value, fill: by_position(value, targets, g, fill)  # noqa: E731
    seen = put(jnp.ones_like(targets, bool), False) & (state.generated == spec.mask_id) & state.active[:, None]
    last = lambda value: jnp.where(rows.deferred, -jnp.inf, value)  # noqa: E731
    return Scores(
        token=put(rows.token, 0),
        confidence=put(last(rows.confidence), -jnp.inf),
        margin=put(last(rows.margin), -jnp.inf),
        neg_entropy=put(last(rows.neg_entropy), -jnp.inf),
        eligible=seen & state.in_span,
        ahead=seen & (jnp.arange(g)[None] >= state.span_end[:, None]),
        near_tie=put(rows.margin < NEAR_TIE, False),
        finite=~jnp.any(jnp.isnan(rows.confidence) & (targets < g), axis=-1),
        drift=result.drift,
        attention=result.attention,
        canvas=_by_column(rows.confidence, state, spec.logit_shift) if needs.rows == "canvas" else None,
    )


def _by_column(confidence: jax.Array, state: DecodeState, shift: int) -> jax.Array:
    """What the rows of every column say, [b, n], at the columns that they score: 0 for the padding, and for a first position
    that is behind no row."""
    scored = jnp.pad(confidence, ((0, 0), (shift, 0)))[:, : confidence.shape[1]]
    return jnp.where(state.positions >= shift, scored, 0.0)
