"""Every Pallas kernel against its plain definition at the shapes of real passes: how far apart, and how long each takes.

What a check compares is given a scale of its own: an error is the largest difference over the largest magnitude, or a count
of values that are not the same. Tolerances are those of the number format; they are not fitted to a device.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import Distribution, Measured, attend, measure
from pallas_kernels.head_scores import head_scores
from pallas_kernels.residual import Nvfp4, Patched, patched, quantised
from pallas_kernels.vocab_scores import VocabScores, vocab_scores
from polestar_jax.spec import ModelSpec

BF16 = 2.0**-6  # two units in the last place of the largest magnitude: the weights are rounded, and so is their sum
# What rounding a rotated key the other way does to a score, with room; nothing is rounded where nothing is rotated.
ROTATED, PLAIN = 2.0**-7, 1e-4
# Float32 sums of as many terms as there are ids, in another order.
SCORES = {"unequal tokens": 0.0} | dict.fromkeys(("confidence", "margin", "neg_entropy", "lse"), 1e-4)
SHARPNESS = 3.0  # standard deviation of attention scores: rows that look at some keys, as trained ones do


class Error(NamedTuple):
    """How far the kernel's value is from the definition's, and how far it may be."""

    field: str
    value: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.value <= self.tolerance  # false for NaN

    @property
    def share(self) -> float:
        """Of the tolerance; infinite where there is none and the values differ, or where there is no number."""
        if self.value == 0:
            return 0.0
        return self.value / self.tolerance if self.tolerance and self.value == self.value else float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What one model's passes look like.

    Attributes:
      spec: of the model; name: what to call it.
      rows: of a block with the row before it, where the model needs that; window: rows of the window; keys: canvas columns;
      pad: of those that do not exist; clusters: of the window.
      barred: ids that are never proposed.
      dtype: of weights and rows.
    """

    spec: ModelSpec
    name: str
    rows: int
    window: int
    keys: int
    pad: int
    clusters: int
    barred: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One kernel at one shape.

    Attributes:
      name: operation, model and rows.
      arguments: makes them, on the device, from a key.
      run: the operation, of the arguments and ``backend``.
      errors: by field, of the kernel's result (first) against the definition's.
      tolerances: by field.
    """

    name: str
    arguments: Callable[[jax.Array], tuple]
    run: Callable[..., Any]
    errors: Callable[[Any, Any], dict[str, jax.Array]]
    tolerances: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a check gave.

    Attributes:
      name: the check's.
      worst: the error nearest to its tolerance, or furthest beyond.
      seconds, plain_seconds: medians, of the kernel and of the definition.
      bytes: of operands and results, each once.
    """

    name: str
    worst: Error
    seconds: float
    plain_seconds: float
    bytes: int


def checks(shape: Shape) -> Iterator[Check]:
    """Every kernel at the shapes that a refresh step, a step and an entry give it."""
    rows, every = shape.rows, shape.rows + shape.window
    yield from (_attention(shape, count) for count in (rows, every, shape.keys))
    yield _drift(shape, rows)
    yield _cluster_drift(shape)
    yield _patched(shape)
    yield _quantised(shape)
    # A step scores its block; a refresh as many rows of the suffix, too; Dream's rows with the one before them.
    block = rows - shape.spec.logit_shift
    yield from (_head_scores(shape, count) for count in dict.fromkeys((block, block + 1, 2 * block)))
    yield _vocab_scores(shape, block)


def check(case: Check, route: str, *, calls: int, repeats: int, seed: int = 0) -> Outcome:
    """Compare and time a kernel's ``route`` ("pallas" or "interpret") with the definition.

    A time is that of ``calls`` calls in one program, after a first one, divided by their number: dispatch is no part of it,
    and operands that fit a cache are read from there.

    Raises:
      pallas_kernels.dispatch.Unsupported: the kernel cannot be had.
    """
    arguments = jax.block_until_ready(jax.jit(case.arguments)(jax.random.key(seed)))
    results, seconds = [], []
    for backend in (route, "xla"):
        program = jax.jit(_again(functools.partial(case.run, backend=backend), calls)).lower(*arguments).compile()
        results.append(jax.block_until_ready(program(*arguments)))
        times = [_seconds(program, arguments) / calls for _ in range(repeats)]
        seconds.append(statistics.median(times))
    found = jax.device_get(jax.jit(case.errors)(*results))
    errors = [Error(field, float(value), case.tolerances[field]) for field, value in found.items()]
    return Outcome(
        name=case.name,
        worst=max(errors, key=lambda error: error.share),
        seconds=seconds[0],
        plain_seconds=seconds[1],
        bytes=sum(array.nbytes for array in jax.tree.leaves((arguments, results[1]))),
    )


def _seconds(program: Callable, arguments: tuple) -> float:
    started = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - started


def _again(function: Callable, times: int) -> Callable:
    """``function`` called ``times`` times, each call behind the one before."""

    def run(*arguments: Any) -> Any:
        def body(_: Any, last: Any) -> Any:
            held, _ = lax.optimization_barrier((arguments, last))  # or the compiler sees that all calls are the same
            return function(*held)

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *arguments))
        return lax.fori_loop(0, times, body, nothing)

    return run


def _relative(got: jax.Array, want: jax.Array) -> jax.Array:
    """The largest difference over the largest magnitude."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.max(jnp.abs(got - want)) / jnp.maximum(jnp.max(jnp.abs(want)), 1e-30)


def _rounding(dtype: str) -> float:
    return BF16 if dtype == "bfloat16" else 1e-5


def _operands(shape: Shape, rows: int, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows [1, r, h, e], and the keys [1, g, n, e] and values [1, g, e, n] of a cache."""
    spec, n = shape.spec, shape.keys
    shapes = ((1, rows, spec.n_heads, spec.head_dim), (1, spec.n_kv_heads, n, spec.head_dim))
    shapes += ((1, spec.n_kv_heads, spec.head_dim, n),)
    q, k, v = (_normal(key, i, each, shape.dtype) for i, each in enumerate(shapes))
    return q * jnp.asarray(SHARPNESS, q.dtype), k, v


def _normal(key: jax.Array, index: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, index), shape, jnp.dtype(dtype))


def _canvas(shape: Shape) -> jax.Array:
    return jnp.arange(shape.keys)[None] - shape.pad


def _attention(shape: Shape, rows: int) -> Check:
    def arguments(key: jax.Array) -> tuple:
        canvas = _canvas(shape)
        return (*_operands(shape, rows, key), canvas[:, -rows:], canvas)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, keys: jax.Array, *, backend: str) -> jax.Array:
        theta = shape.spec.rope_theta
        return attend(q, k, v, q_positions=rows, k_positions=keys, theta=theta, valid=keys >= 0, backend=backend)

    return Check(
        name=f"attention, {shape.name}, {rows} rows over {shape.keys} keys",
        arguments=arguments,
        run=run,
        errors=lambda got, want: {"output": _relative(got, want)},
        tolerances={"output": _rounding(shape.dtype)},
    )


def _drift(shape: Shape, rows: int) -> Check:
    """A block's rows at the last layer, and how far their attention moved."""
    theta = shape.spec.rope_theta

    def arguments(key: jax.Array) -> tuple:
        q, k, v = _operands(shape, rows, key)
        before = q + 0.3 * _normal(key, 3, q.shape, shape.dtype)
        canvas = _canvas(shape)
        places = dict(q_positions=canvas[:, -rows:], k_positions=canvas, theta=theta, valid=canvas >= 0)
        return q, k, v, canvas[:, -rows:], canvas, measure(before, k, backend="xla", **places).distribution

    def run(q, k, v, rows, keys, previous: Distribution, *, backend: str) -> Measured:
        places = dict(q_positions=rows, k_positions=keys, theta=theta, valid=keys >= 0)
        return measure(q, k, v, previous=previous, backend=backend, **places)

    return Check(
        name=f"drift, {shape.name}, {rows} rows over {shape.keys} keys",
        arguments=arguments,
        run=run,
        errors=_measured_errors,
        tolerances=dict.fromkeys(("drift", "probabilities"), ROTATED) | {"output": _rounding(shape.dtype)},
    )


def _cluster_drift(shape: Shape) -> Check:
    """The centroids at a refresh: what they attend to by content, and how far that moved."""

    def arguments(key: jax.Array) -> tuple:
        q, k, _ = _operands(shape, shape.clusters, key)
        valid = _canvas(shape) >= 0
        before = q + 0.3 * _normal(key, 3, q.shape, shape.dtype)
        return q, k, valid, measure(before, k, valid=valid, backend="xla").distribution

    def run(q, k, valid, previous: Distribution, *, backend: str) -> Measured:
        return measure(q, k, previous=previous, valid=valid, backend=backend)

    return Check(
        name=f"drift, {shape.name}, {shape.clusters} centroids over {shape.keys} keys",
        arguments=arguments,
        run=run,
        errors=_measured_errors,
        tolerances=dict.fromkeys(("drift", "probabilities"), PLAIN),
    )


def _measured_errors(got: Measured, want: Measured) -> dict[str, jax.Array]:
    new, old = (jnp.exp(each.distribution.log_probabilities) for each in (got, want))
    errors = {"drift": _relative(got.drift, want.drift), "probabilities": _relative(new, old)}
    return errors | ({} if want.out is None else {"output": _relative(got.out, want.out)})


def _patched(shape: Shape) -> Check:
    """A refresh reads the window's stored states of a layer, some of its rows new, and norms them."""

    def arguments(key: jax.Array) -> tuple:
        states, centroids, labels = _window(shape, key)
        stored = quantised(states, centroids, labels, backend="xla")
        packet = _normal(key, 3, states.shape, shape.dtype)
        chosen = jax.random.bernoulli(jax.random.fold_in(key, 4), 0.5, states.shape[:2])
        return stored, centroids, labels, packet, chosen, 1 + 0.1 * _normal(key, 5, states.shape[2:], shape.dtype)

    def errors(got: Patched, want: Patched) -> dict[str, jax.Array]:
        same = {name: jnp.sum(getattr(got, field) != getattr(want, field)) for name, field in equal.items()}
        return same | {"norm": _relative(got.normed, want.normed)}

    equal = {"unequal states": "states", "unequal changes": "change"}
    return Check(
        name=f"residual patched, {shape.name}, {shape.window} rows",
        arguments=arguments,
        run=lambda *args, backend: patched(*args, eps=shape.spec.norm_eps, backend=backend),
        errors=errors,
        tolerances=dict.fromkeys(equal, 0.0) | {"norm": _rounding(shape.dtype)},
    )


def _quantised(shape: Shape) -> Check:
    """A refresh writes the window's states of a layer."""
    names = {field: f"unequal {field}" for field in Nvfp4._fields}
    return Check(
        name=f"residual quantised, {shape.name}, {shape.window} rows",
        arguments=lambda key: _window(shape, key),
        run=lambda *args, backend: quantised(*args, backend=backend),
        errors=lambda got, want: {
            name: jnp.sum(getattr(got, field) != getattr(want, field)) for field, name in names.items()
        },
        tolerances=dict.fromkeys(names.values(), 0.0),
    )


def _window(shape: Shape, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """States [1, w, d] around their centroids [1, K, d], and their labels [1, w]."""
    d, labels = shape.spec.d_model, jnp.arange(shape.window)[None] % shape.clusters
    centroids = _normal(key, 0, (1, shape.clusters, d))
    return centroids[:, labels[0]] + 0.3 * _normal(key, 1, (1, shape.window, d)), centroids, labels


def _head_scores(shape: Shape, rows: int) -> Check:
    def arguments(key: jax.Array) -> tuple:
        d, v = shape.spec.d_model, shape.spec.vocab_size
        return _normal(key, 0, (1, rows, d), shape.dtype), SHARPNESS * d**-0.5 * _normal(key, 1, (d, v), shape.dtype)

    return Check(
        name=f"head scores, {shape.name}, {rows} rows",
        arguments=arguments,
        run=lambda *args, backend: head_scores(*args, barred=shape.barred, backend=backend),
        errors=_score_errors,
        tolerances=SCORES,
    )


def _vocab_scores(shape: Shape, rows: int) -> Check:
    return Check(
        name=f"vocab scores, {shape.name}, {rows} rows",
        arguments=lambda key: (SHARPNESS * _normal(key, 0, (1, rows, shape.spec.vocab_size)),),
        run=lambda logits, backend: vocab_scores(logits, barred=shape.barred, backend=backend),
        errors=_score_errors,
        tolerances=SCORES,
    )


def _score_errors(got: VocabScores, want: VocabScores) -> dict[str, jax.Array]:
    """The token may differ where two are as good."""
    unequal = jnp.sum((got.token != want.token) & (want.margin > 1e-4))
    statistics = (field for field in SCORES if field in VocabScores._fields)
    return {"unequal tokens": unequal} | {
        field: _relative(getattr(got, field), getattr(want, field)) for field in statistics
    }
