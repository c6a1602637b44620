"""From logits to proposed tokens and the statistics commit rules rank by.

Probabilities are float32. At temperature 0 the token is the arg max and no random number is drawn. Above it the token is a
Gumbel-max sample; float32 needs the additive form ``argmax(logits / T + gumbel)`` and fine-grained noise, since the
multiplicative form overflows and a coarse uniform never draws rare tokens.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_scores import VocabScores, vocab_scores
from polestar_jax.spec import ModelSpec

TOKEN_NOISE, ORDER_NOISE, SUFFIX_NOISE = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How proposed tokens are drawn.

    Attributes:
      temperature: 0 for the arg max.
      top_p, top_k: Dream's filters on the tempered distribution, or None.
      filtered_confidence: whether confidence, margin and entropy are those of the tempered, filtered distribution (Dream)
        or of the plain softmax (LLaDA). The same at temperature 0 without filters; the token is then the arg max either way.
      exclude_mask: whether the mask token is barred (paper equation 1).
      eos: "allow"; "last": a proposed end-of-text or end-of-turn token has the lowest confidence, so it is committed when
        nothing else is left; "never": these tokens are barred.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    filtered_confidence: bool = False
    exclude_mask: bool = True
    eos: str = "allow"

    @property
    def needs_logits(self) -> bool:
        """Whether more is asked for than the plain softmax and its arg max."""
        filters = self.top_k is not None or (self.top_p is not None and self.top_p < 1)
        return self.temperature > 0 or (self.filtered_confidence and filters)

    def barred(self, spec: ModelSpec) -> tuple[int, ...]:
        """Ids that are never proposed."""
        return ((spec.mask_id,) if self.exclude_mask else ()) + (spec.stop_ids if self.eos == "never" else ())


class RowScores(NamedTuple):
    """Scores of rows, each [b, r]; see :class:`polestar_jax.decode.state.Scores`. ``deferred``: to be committed last."""

    token: jax.Array
    confidence: jax.Array
    margin: jax.Array
    neg_entropy: jax.Array
    deferred: jax.Array


def score_rows(logits: jax.Array, sampling: Sampling, spec: ModelSpec, key: jax.Array) -> RowScores:
    """Proposed tokens and their statistics.

    Args:
      logits: f32 [b, r, v]; never changed in place or reused noised.
      sampling: the settings.
      spec: names the barred ids.
      key: PRNG keys [b]; unused at temperature 0.
    """
    if not sampling.needs_logits:
        return best_rows(vocab_scores(logits, barred=sampling.barred(spec)), sampling, spec)
    logits = barred_logits(logits, sampling, spec)
    if sampling.temperature == 0:
        return best_rows(vocab_scores(_filtered(logits, sampling)), sampling, spec)
    return _deferring(_sampled(logits, sampling, key), sampling, spec)


def barred_logits(logits: jax.Array, sampling: Sampling, spec: ModelSpec) -> jax.Array:
    """Logits [..., v] with -inf for the ids that are never proposed."""
    barred = sampling.barred(spec)
    return logits.at[..., list(barred)].set(-jnp.inf) if barred else logits


def best_rows(best: VocabScores, sampling: Sampling, spec: ModelSpec) -> RowScores:
    """The arg max and its statistics, from the scores [b, r] of a vocabulary without the barred ids."""
    none = jnp.zeros_like(best.token, bool)
    return _deferring(RowScores(best.token, best.confidence, best.margin, best.neg_entropy, none), sampling, spec)


def _deferring(scores: RowScores, sampling: Sampling, spec: ModelSpec) -> RowScores:
    if sampling.eos != "last":
        return scores
    return scores._replace(deferred=jnp.isin(scores.token, jnp.array(spec.stop_ids)))


def _sampled(logits: jax.Array, sampling: Sampling, key: jax.Array) -> RowScores:
    tempered = _filtered(logits / sampling.temperature, sampling)
    # One draw a sequence, so that a sequence samples the same alone and in a batch.
    noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:], jnp.float32, mode="high"))(key)
    token = jnp.argmax(tempered + noise, axis=-1).astype(jnp.int32)
    shown = tempered if sampling.filtered_confidence else logits
    stats = vocab_scores(shown)
    chosen = jnp.take_along_axis(shown, token[..., None], axis=-1)[..., 0]
    confidence = jnp.exp(chosen - stats.lse)
    return RowScores(token, confidence, stats.margin, stats.neg_entropy, jnp.zeros_like(token, bool))


def _filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Top-k, then nucleus filtering of logits [..., v]: everything else becomes -inf; the best token always stays."""
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        above = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        # A token stays while the mass strictly before it is at most top_p.
        before = jnp.concatenate([jnp.zeros_like(above[..., :1]), above[..., :-1]], axis=-1)
        last = jnp.sum(before <= sampling.top_p, axis=-1, keepdims=True) - 1
        logits = jnp.where(logits < jnp.take_along_axis(ordered, last, axis=-1), -jnp.inf, logits)
    if sampling.top_k is not None:
        kth = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    return logits
