"""Attention and its drift: the kernel, interpreted, against the definition, and both against float64."""

from __future__ import annotations

import logging
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch
from pallas_kernels.attention import Distribution, attend, measure, triton

BACKENDS = ("xla", "interpret")
THETA = 5e5
OUT = {
    "float32": 5e-6,
    "bfloat16": 2e-2,
}  # of values of unit variance; in bfloat16 one unit in the last place of 2 to 4
KL = 1e-5
few = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
many = settings(few, max_examples=60)


class Case:
    """Random rows, keys and values; ``pad`` keys at each sequence's start do not exist."""

    def __init__(self, b=1, r=8, h=4, g=2, n=70, e=64, pad=(0,), dtype="float32", theta=THETA, seed=0):
        rng = np.random.default_rng(seed)
        self.q, self.k, self.v, change = (
            jnp.asarray(rng.normal(size=shape), dtype)
            for shape in ((b, r, h, e), (b, g, n, e), (b, g, e, n), (b, r, h, e))
        )
        self.before = self.q + 0.3 * change
        keys = jnp.arange(n)[None] - jnp.asarray(pad, jnp.int32)[:, None]
        rows = jnp.asarray(rng.integers(0, n, (b, r)), jnp.int32)
        self.options = dict(q_positions=rows, k_positions=keys, theta=theta, valid=keys >= 0 if any(pad) else None)

    def measured(self, backend: str):
        theta = self.options["theta"]
        arrays = {name: value for name, value in self.options.items() if name != "theta"}

        @jax.jit
        def both(before, q, k, v, arrays):
            distribution = measure(before, k, backend="xla", theta=theta, **arrays).distribution
            return measure(q, k, v, previous=distribution, backend=backend, theta=theta, **arrays)

        with mock.patch.multiple(triton, MAX_ROWS=16, MAX_KEYS=32):
            return both(self.before, self.q, self.k, self.v, arrays)

    def exact(self):
        """(probabilities, drift, output) in float64, of inputs rotated as their dtype allows."""
        new, old = self._probabilities(self.q), self._probabilities(self.before)
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(new > 0, new * (np.log(new) - np.log(old)), 0.0)
        per_head = terms.sum(-1)
        v = np.repeat(np.asarray(self.v, np.float64), self.q.shape[2] // self.k.shape[1], axis=1)
        return new, per_head.mean(1), np.einsum("bhrn,bhen->brhe", new, v)

    def _probabilities(self, q):
        q, k = np.asarray(q, np.float64), np.asarray(self.k, np.float64)
        if self.options["theta"]:
            q = _rotated(q, np.asarray(self.options["q_positions"])[:, :, None], self.options["theta"])
            k = _rotated(k, np.asarray(self.options["k_positions"])[:, None], self.options["theta"])
        k = np.repeat(k, q.shape[2] // k.shape[1], axis=1)
        scores = np.einsum("brhe,bhne->bhrn", q, k) / np.sqrt(q.shape[-1])
        if self.options["valid"] is not None:
            scores = np.where(np.asarray(self.options["valid"])[:, None, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)


def _rotated(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[..., None] / theta ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


@st.composite
def cases(draw):
    b = draw(st.integers(1, 2))
    g = draw(st.sampled_from([1, 2]))
    n = draw(st.integers(2, 150))
    return dict(
        b=b, r=draw(st.sampled_from([1, 2, 7, 8, 17, 33])), h=g * draw(st.integers(1, 3)), g=g, n=n,
        e=draw(st.sampled_from([2, 16, 64, 72, 128])),
        pad=tuple(draw(st.lists(st.integers(0, n - 1), min_size=b, max_size=b))),
        theta=draw(st.sampled_from([None, 1e4, THETA])), seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@few
@given(cases())
def test_b51_kernel_and_definition_equal_float64(values):
    assert_equal_float64(values)


@pytest.mark.slow
@many
@given(cases())
def test_b51_kernel_and_definition_equal_float64_at_many_shapes(values):
    assert_equal_float64(values)


def assert_equal_float64(values):
    case = Case(**values)
    probabilities, drift, out = case.exact()
    for backend in BACKENDS:
        got = case.measured(backend)
        np.testing.assert_allclose(
            np.exp(got.distribution.log_probabilities), probabilities, atol=2e-6, err_msg=backend
        )
        np.testing.assert_allclose(got.drift, drift, rtol=0, atol=KL, err_msg=backend)
        np.testing.assert_allclose(got.out, out, rtol=0, atol=OUT["float32"], err_msg=backend)
        alone = attend(case.q, case.k, case.v, backend=backend, **case.options)
        np.testing.assert_allclose(alone, out, rtol=0, atol=OUT["float32"], err_msg=backend)


@pytest.mark.parametrize(
    ("e", "dtype"),
    [
        (64, "bfloat16"),
        (72, "bfloat16"),
        (128, "float16"),
        pytest.param(64, "float16", marks=pytest.mark.slow),
        pytest.param(72, "float16", marks=pytest.mark.slow),
        pytest.param(128, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_half_precision_kernel_equals_definition(e, dtype):
    case = Case(r=33, n=100, e=e, dtype=dtype, pad=(5,))
    want, got = case.measured("xla"), case.measured("interpret")
    np.testing.assert_allclose(got.distribution.scores, want.distribution.scores, rtol=0, atol=2e-5)
    np.testing.assert_allclose(got.drift, want.drift, rtol=0, atol=KL)
    assert got.out.dtype == case.q.dtype
    np.testing.assert_allclose(
        np.asarray(got.out, np.float32), np.asarray(want.out, np.float32), rtol=0, atol=OUT["bfloat16"]
    )


def test_keys_are_split_among_programs_and_merged():
    case = Case(r=3, n=500, pad=(200,))
    shapes = [("q", case.q), ("k", case.k), ("v", case.v)]
    assert triton.plan(dict(shapes), True, interpret=True).splits > 2
    np.testing.assert_allclose(case.measured("interpret").out, case.exact()[2], rtol=0, atol=OUT["float32"])
    np.testing.assert_allclose(case.measured("interpret").drift, case.exact()[1], rtol=0, atol=KL)


def test_drift_of_what_did_not_move_is_zero_and_of_peaks_finite():
    case = Case(r=4, n=40)
    sharp = case.q * 200  # all mass on one key: probabilities below 1e-12 count as that
    for backend in BACKENDS:
        first = measure(sharp, case.k, backend=backend, **case.options).distribution
        still = measure(sharp, case.k, previous=first, backend=backend, **case.options)
        assert np.abs(still.drift).max() <= KL
        moved = measure(-sharp, case.k, previous=first, backend=backend, **case.options)
        assert np.isfinite(moved.drift).all() and 20 < moved.drift.max() < 27.7  # -log 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_any_key_are_finite(backend):
    case = Case(b=2, n=40, pad=(40, 3))
    got = case.measured(backend)
    assert np.isfinite(got.out).all() and np.isfinite(got.drift).all() and not got.drift[0].any()
    mean = np.repeat(np.asarray(case.v).mean(-1)[0], 2, axis=0)  # of every value, for the heads of each group
    np.testing.assert_allclose(got.out[0], np.broadcast_to(mean, got.out[0].shape), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_none(backend, value):
    case = Case(r=2, n=40)
    case.k = case.k.at[0, 0, 7].set(value)
    got = case.measured(backend)
    assert np.isnan(got.out[:, :, :2]).all() and np.isfinite(got.out[:, :, 2:]).all()  # heads of key head 0, and of 1
    assert np.isnan(got.drift).all()


def test_masked_value_that_is_no_number_poisons_only_through_its_weight():
    """A value that no row may attend to has weight 0; 0 times NaN is NaN, in the definition as in the kernel."""
    case = Case(r=2, n=40, pad=(4,))
    case.v = case.v.at[0, 0, 0, 1].set(np.nan)
    for backend in BACKENDS:
        out = case.measured(backend).out
        assert np.isnan(out[:, :, :2, 0]).all() and np.isfinite(out[:, :, :, 1:]).all()


def test_b51_what_no_kernel_serves_falls_back_with_one_notice(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_reported", set())
    case = Case(r=3, n=9)
    allowed = jnp.asarray(np.random.default_rng(0).random((1, 3, 9)) < 0.7).at[:, :, 0].set(True)
    options = case.options | {"valid": allowed}
    want = attend(case.q, case.k, case.v, backend="xla", **options)
    with dispatch.using("interpret"), caplog.at_level(logging.WARNING, "pallas_kernels"):
        for _ in range(2):
            np.testing.assert_array_equal(attend(case.q, case.k, case.v, **options), want)
    assert [record.getMessage() for record in caplog.records] == ["attention runs as plain XLA: a mask by row and key"]
    with pytest.raises(dispatch.Unsupported, match="a mask by row and key"):
        attend(case.q, case.k, case.v, backend="interpret", **options)
    with pytest.raises(dispatch.Unsupported, match="head_dim 130"):
        Case(e=130, n=5).measured("interpret")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v=jnp.zeros((1, 2, 70, 64))), r"v \[1, 2, 70, 64\]: need \[1, 2, 64, 70\]"),
        (dict(k=jnp.zeros((1, 3, 70, 64))), "4 heads: need a multiple of the 3"),
        (dict(k=jnp.zeros((1, 2, 70, 64), jnp.bfloat16)), "k is bfloat16: need one of"),
        (dict(valid=jnp.ones((1, 70), jnp.int32)), "valid is int32: need bool"),
        (dict(k_positions=jnp.zeros((1, 5), jnp.int32)), r"k_positions \[1, 5\]: need \[1, 70\] to rotate"),
        (dict(q_positions=None), "q_positions None: need"),
        (dict(valid=jnp.ones((1, 69), bool)), r"valid \[1, 69\]: need \[1, 70\]"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    case = Case()
    args = dict(q=case.q, k=case.k, v=case.v) | case.options | change
    if "k" in change:
        args["v"] = jnp.swapaxes(args["k"], 2, 3).astype(jnp.float32)
    with pytest.raises(ValueError, match=message):
        attend(**args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_drift_of_scores_that_are_no_numbers_is_none(backend):
    case = Case(r=2, n=40, theta=None)
    good = measure(case.q, case.k, backend="xla").distribution
    lost = measure(jnp.full_like(case.q, -jnp.inf), jnp.abs(case.k), previous=good, backend=backend)
    assert np.isnan(lost.drift).all()
    for bad in (good._replace(lse=good.lse * jnp.nan), good._replace(scores=good.scores.at[..., 3].set(jnp.nan))):
        assert np.isnan(measure(case.q, case.k, previous=bad, backend=backend).drift).all()
    with pytest.raises(ValueError, match=r"previous\.lse \[1, 4, 1\]: need \[1, 4, 2\]"):
        measure(case.q, case.k, previous=good._replace(lse=good.lse[..., :1]), backend=backend)
    with pytest.raises(ValueError, match=r"previous\.scores is bfloat16: need float32"):
        measure(case.q, case.k, previous=good._replace(scores=good.scores.astype(jnp.bfloat16)), backend=backend)


def test_distribution_has_the_shape_of_the_next_steps_previous():
    got = Case(b=2, r=5, pad=(0, 3)).measured("interpret")
    assert isinstance(got.distribution, Distribution)
    assert got.distribution.scores.shape == (2, 4, 5, 70) and got.distribution.lse.shape == (2, 4, 5)
    np.testing.assert_allclose(np.exp(got.distribution.log_probabilities).sum(-1), 1, rtol=1e-5)
