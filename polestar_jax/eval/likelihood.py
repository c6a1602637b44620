"""How likely a masked diffusion model finds an answer: LLaDA's Monte-Carlo estimate (arXiv 2502.09992, appendix).

A masked model gives no probability of a text, but a bound on its logarithm: mask l of the answer's L tokens, l uniform in 1..L
and the positions uniform among those of that number, and take

    (L / l) * sum of log p(token | all that is not masked) over the masked positions

on average. The bound is the log-likelihood itself where the model's distributions are those of one joint distribution. Answers
whose 2^L - 1 patterns are no more than the samples asked for are not sampled: all patterns are weighed, which is exact.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from polestar_jax.decode import engine
from polestar_jax.decode.prompts import check_ids, check_prompt
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser

SAMPLES, BATCH = 128, 8


class Patterns(NamedTuple):
    """Which tokens are masked, bool [m, L], and the weight of each pattern's sum, float64 [m]."""

    masked: np.ndarray
    weights: np.ndarray


def log_likelihood(
    model: Denoiser,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    n_samples: int = SAMPLES,
    seed: int = 0,
    batch_size: int = BATCH,
) -> float:
    """The estimate for ``answer`` after ``prompt``, in nats; 0 for an empty answer.

    Probabilities are of the softmax over all ids, the mask token included, as LLaDA's. It is a function of its arguments:
    answers of the same length are masked alike, which takes noise out of their comparison.

    Args:
      model: from ``load``.
      prompt, answer: token ids; the prompt has at least one.
      n_samples: masked answers to average over; equal ones cost one pass.
      seed: of the masks.
      batch_size: masked answers of one pass; it bounds the memory, 4 batch_size len(answer) vocab_size bytes.

    Raises:
      InputError: ids that cannot be used, or too many for the model.
    """
    for name, value in (("n_samples", n_samples), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InputError(f"{name} {value!r} is not accepted: a whole number >= 1")
    _check(model, prompt, answer)
    if not len(answer):
        return 0.0
    patterns = make_patterns(len(answer), n_samples, seed)
    target = np.asarray(answer, np.int32)
    total = 0.0
    for first in range(0, len(patterns.masked), batch_size):
        some = slice(first, first + batch_size)
        masked = patterns.masked[some]
        answers = np.where(masked, model.spec.mask_id, target)
        # A short last batch is filled up, so that it runs the program of the others.
        filled = np.concatenate([answers, np.repeat(answers[-1:], batch_size - len(answers), axis=0)])
        found = np.asarray(_log_probabilities(*_inputs(model, prompt, filled), _padded(target)), np.float64)
        sums = np.where(masked, found[: len(masked), : len(answer)], 0.0).sum(axis=1)
        total += float(patterns.weights[some] @ sums)
    return total


def is_greedy(model: Denoiser, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether decoding len(answer) positions one a pass, the most confident first, gives the answer (LLaDA's own sampler)."""
    _check(model, prompt, answer)
    target = np.asarray(answer, np.int32)
    decided = np.full((1, len(target)), model.spec.mask_id, np.int32)
    for _ in range(len(target)):
        tokens, confidences = jax.device_get(_best(*_inputs(model, prompt, decided)))
        masked = decided[0] == model.spec.mask_id
        place = int(np.argmax(np.where(masked, confidences[0, : len(target)], -np.inf)))
        if tokens[0, place] != target[place]:
            return False
        decided[0, place] = target[place]
    return True


def make_patterns(length: int, n_samples: int, seed: int) -> Patterns:
    """Masks for an answer of ``length`` tokens: all there are where those are no more than ``n_samples``, else samples.

    How many tokens a sample masks is drawn in equal shares: sample i of n takes the i-th n-th of 1..length.
    """
    if length < 63 and 2**length - 1 <= n_samples:
        masked = np.array(list(itertools.product((False, True), repeat=length))[1:])
        counts = masked.sum(axis=1)
        return Patterns(masked, np.array([1 / (int(count) * math.comb(length, int(count))) for count in counts]))
    rng = np.random.default_rng([seed, length])
    shares = (np.arange(n_samples) + rng.random()) / n_samples
    counts = np.minimum(1 + (shares * length).astype(int), length)
    ranks = rng.random((n_samples, length)).argsort(axis=1).argsort(axis=1)
    masked, times = np.unique(ranks < counts[:, None], axis=0, return_counts=True)
    return Patterns(masked, times / n_samples * length / masked.sum(axis=1))


def _check(model: Denoiser, prompt: Sequence[int], answer: Sequence[int]) -> None:
    check_prompt(prompt, model.spec, len(answer))
    if len(answer):
        check_ids(answer, model.spec)
    if model.spec.mask_id in [int(token) for token in answer]:
        raise InputError(f"the answer contains the mask token {model.spec.mask_id}; answers must be decided")


def _inputs(
    model: Denoiser, prompt: Sequence[int], answers: np.ndarray
) -> tuple[Any, Any, np.ndarray, int, np.ndarray]:
    """What the compiled functions take for answers [b, L]: structure, weights, canvas [b, n], its length, rows [R].

    Canvas and rows have a few sizes only; each is a program.
    """
    graph, weights = engine.split(model)
    length, first = len(prompt) + answers.shape[1], len(prompt) - model.spec.logit_shift
    rows = first + np.arange(_power(answers.shape[1]))
    canvas = np.full((len(answers), engine.bucket(length)), model.spec.eos_id, np.int32)
    canvas[:, : len(prompt)] = prompt
    canvas[:, len(prompt) : length] = answers
    return graph, weights, canvas, length, np.maximum(np.minimum(rows, length - 1), 0).astype(np.int32)


def _power(count: int) -> int:
    """The next power of two, at least 4."""
    return max(4, 1 << (count - 1).bit_length())


def _padded(target: np.ndarray) -> np.ndarray:
    return np.pad(target, (0, _power(len(target)) - len(target)))


def _rows(model: Denoiser, canvas: jax.Array, length: jax.Array, rows: jax.Array) -> jax.Array:
    """Last-layer rows [b, R, d]."""
    positions = jnp.broadcast_to(jnp.arange(canvas.shape[1]), canvas.shape)
    return jnp.take(model(canvas, positions, positions < length), rows, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(
    graph: nnx.GraphDef, weights: Any, canvas: jax.Array, length: jax.Array, rows: jax.Array, target: jax.Array
) -> jax.Array:
    """Log probability [b, R] of target [R] by the rows."""
    model = nnx.merge(graph, weights)
    with engine.precision(model.dtype):
        logits = model.logits(_rows(model, canvas, length, rows))
    chosen = jnp.take_along_axis(logits, jnp.broadcast_to(target[:, None], (*logits.shape[:2], 1)), axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _best(
    graph: nnx.GraphDef, weights: Any, canvas: jax.Array, length: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The most probable token but the mask, and its probability, of each row, each [b, R]."""
    model = nnx.merge(graph, weights)
    with engine.precision(model.dtype):
        scores = model.scores(_rows(model, canvas, length, rows), (model.spec.mask_id,))
    return scores.token, scores.confidence
