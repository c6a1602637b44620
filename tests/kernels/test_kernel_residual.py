"""NVFP4 residuals: both routes against numpy's quotients and ml_dtypes' casts, bit by bit, and against each other."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import shapes
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.residual import Nvfp4, nvfp4, patched, quantised
from polestar_jax.models.denoiser import RMSNorm
from polestar_jax.polestar import residuals

ROUTES = ("xla", "interpret")
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
MIDDLES = (E2M1[:7] + E2M1[1:8]) / 2
EPS = 1e-5
SMALL = (2, 3, 48)  # what most tests use, so that little is compiled

quantise = jax.jit(quantised, static_argnames=("direct", "backend"))
patch = jax.jit(patched, static_argnames=("eps", "direct", "backend"))


class Window(NamedTuple):
    """Arguments of both operations, less what is quantised."""

    centroids: np.ndarray
    labels: np.ndarray

    def rows(self) -> np.ndarray:
        """The centroid of each row, zeros outside 0 .. K - 1."""
        one_hot = self.labels[..., None] == np.arange(self.centroids.shape[1])
        picked = np.take_along_axis(self.centroids, one_hot.argmax(-1)[..., None], axis=1)
        return np.where(one_hot.any(-1)[..., None], picked, np.float32(0))


def window(seed: int, b: int, w: int, d: int, clusters: int) -> Window:
    rng = np.random.default_rng(seed)
    labels = rng.integers(-1, clusters + 2, size=(b, w)).astype(np.int32)
    return Window(rng.normal(size=(b, clusters, d)).astype(np.float32), labels)


def states_like(seed: int, *shape: int) -> np.ndarray:
    """Groups of magnitudes far apart, some of them zero."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.uniform(-9, 6, size=(*shape[:2], shape[2] // 16))) * (
        rng.random((*shape[:2], shape[2] // 16)) < 0.9
    )
    return (rng.normal(size=shape) * np.repeat(size, 16, axis=-1)).astype(np.float32)


def oracle(values: np.ndarray) -> Nvfp4:
    """NVFP4 of finite values f32 [b, w, d]: numpy's float32 quotients, which are IEEE's, cast by ml_dtypes."""
    b, w, d = values.shape
    groups = values.reshape(b, w, d // 16, 16)
    amax = np.abs(groups).max(-1)
    scale = amax.max((1, 2)) / np.float32(6 * 448)
    scale = np.where(scale < 2.0**-100, np.float32(0), scale)
    inner = scale[:, None, None] * np.float32(6)
    scales = np.divide(amax, inner, out=np.zeros_like(amax), where=inner > 0)
    scales = np.minimum(scales, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    step = (scale[:, None, None] * scales.astype(np.float32))[..., None]
    quotients = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
    codes = quotients.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = np.where(codes == 8, 0, codes).astype(np.uint8).reshape(b, w, d // 2, 2)  # a zero has no sign
    return Nvfp4(codes[..., 0] | codes[..., 1] << 4, scales.view(np.uint8), scale)


def assert_same_bits(got, want) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, index
        if a.dtype == np.float32:
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=str(index))
            a, b = (np.where(np.isnan(x), np.float32(0), x).view(np.int32) for x in (a, b))  # tells -0 from 0
        np.testing.assert_array_equal(a, b, err_msg=str(index))


def assert_quantised(values: np.ndarray) -> Nvfp4:
    """Quantised without a centroid; every route as the oracle says."""
    base = dead(values.shape)
    for backend in ROUTES:
        got = jax.tree.map(np.asarray, quantise(values, *base, backend=backend))
        assert_same_bits(got, oracle(values))
    return got


def dead(shape: tuple[int, int, int]) -> Window:
    """Two centroids that no row belongs to."""
    b, w, d = shape
    return Window(np.ones((b, 2, d), np.float32), np.full((b, w), 2, np.int32))


def test_every_code_under_every_scale_reads_as_its_format_says():
    codes = np.tile(np.arange(0, 16, 2) | np.arange(1, 16, 2) << 4, 256).astype(np.uint8)  # all 16 in each group
    scales = np.arange(256, dtype=np.uint8)
    packet, chosen, weight = np.zeros((1, 1, 4096), np.float32), np.zeros((1, 1), bool), np.ones(4096, np.float32)
    for scale in np.float32([1.0, 0.3712345, 7e-20]):
        step = scale * E4M3.astype(np.float32)
        want = (E2M1.astype(np.float32) * step[:, None]).reshape(1, 1, 4096)
        stored = Nvfp4(codes[None, None], scales[None, None], scale[None])
        for backend in ROUTES:
            got = patch(stored, None, None, packet, chosen, weight, eps=EPS, direct=True, backend=backend)
            assert_same_bits([got.states], [want])
        assert np.isnan(want.reshape(256, 16)[[0x7F, 0xFF]]).all() and np.isnan(want).sum() == 32


def test_values_by_themselves_are_cast_to_e2m1():
    values = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)  # every tie, and what lies around it
    values = values[~np.isnan(values)]
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(nvfp4.to_e2m1(jnp.asarray(values)), np.where(codes == 8, 0, codes))
    np.testing.assert_array_equal(nvfp4.from_e2m1(jnp.arange(16), jnp.float32(1)), E2M1)


def beside(x: np.ndarray, towards: np.ndarray) -> np.ndarray:
    """float32 neighbours of x (float64): the nearest, and that moved by -1, 0 or 1 steps."""
    x = x.astype(np.float32)
    return np.where(
        towards < 0, np.nextafter(x, np.float32(0)), np.where(towards > 0, np.nextafter(x, np.float32(np.inf)), x)
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 2688.0, 0.7391, 1e-25, 1.5e38]))
def test_ties_and_their_neighbours(seed, top):
    """Group magnitudes at the midway points between E4M3 numbers, values at those between E2M1 numbers, and one float32 to
    either side; both with steps where the midway points are float32 numbers and with ones where they are not."""
    rng = np.random.default_rng(seed)
    coarse = rng.random() < 0.5  # few bits: ties are exact
    top = np.float32(top * 2.0 ** rng.integers(-3, 1) * (1 if coarse else rng.uniform(0.5, 1)))
    scale = np.float64(top / np.float32(2688))
    middles = (E4M3[:126] + E4M3[1:127]) / 2
    which = rng.integers(0, 126, size=128)
    amax = beside(
        6 * scale * np.where(rng.random(128) < 0.5, middles[which], E4M3[which]), rng.integers(-1, 2, size=128)
    )
    amax[0], amax[1] = top, 0
    scales = oracle(np.repeat(amax, 16)[None, None]).scales
    step = np.float32(scale) * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(128, 1)
    values = beside(step * MIDDLES[rng.integers(0, 7, size=(128, 16))], rng.integers(-1, 2, size=(128, 16)))
    values = np.minimum(values, amax[:, None])
    values[:, 5] = amax
    values *= rng.choice(np.float32([-1, 1]), size=values.shape)
    got = assert_quantised(values.reshape(1, 2, 1024))
    assert got.scale == np.float32(scale)
    assert got.scales[0, 0, 1] == 0 and (got.codes[0, 0, 8:16] == 0).all()


VALUES = hnp.arrays(
    np.float32,
    SMALL,
    elements=st.floats(-(2.0**100), 2.0**100, width=32)
    | st.floats(-8, 8, width=32)
    | st.sampled_from([0.0, 0.0, -0.0, 1e-45, -1e-38, 448.0, 3.4e38]).map(np.float32),
)


@settings(max_examples=30, deadline=None)
@given(VALUES, st.sampled_from([1.0, 2.0**-90, 2.0**-110]))
def test_any_values(values, shrink):
    values = values * np.float32(shrink)
    assert_quantised(np.where(np.abs(values) < 2.0**-126, np.float32(0), values))  # a CPU may flush these, or not


@settings(max_examples=20, deadline=None)
@given(VALUES, st.integers(0, 99))
def test_rows_read_back_within_half_a_step_and_alike_on_both_routes(values, seed):
    base = window(seed, *SMALL, 2)
    values = np.clip(values, -1e30, 1e30)
    packet, chosen, weight = np.zeros_like(values), np.zeros(SMALL[:2], bool), np.ones(48, np.float32)
    kept = [quantise(values, *base, backend=backend) for backend in ROUTES]
    assert_same_bits(*kept)
    read = [patch(kept[0], *base, packet, chosen, weight, eps=EPS, backend=backend) for backend in ROUTES]
    assert_same_bits(read[0][:2], read[1][:2])
    grouped = lambda rows: rows.reshape(2, 3, 3, 16).astype(np.float64)  # noqa: E731
    centroids, amax = grouped(base.rows()), np.abs(grouped(values - base.rows())).max(-1, keepdims=True)
    error = np.abs(grouped(np.asarray(read[0].states)) - grouped(values))
    # Half the widest gap of codes, 1 in 6, with E4M3's relative error; or of its smallest numbers, times the largest code.
    floor = 6 * 2.0**-10 * np.float64(kept[0].scale)[:, None, None, None]
    assert (error <= amax / 6 * (1 + 2**-4) + floor + 3e-7 * (np.abs(centroids) + amax)).all()
    assert not np.asarray(read[0].change).any()


@pytest.mark.parametrize("backend", ROUTES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_make_their_whole_sequence_nan_and_no_other(poison, backend):
    values, base = states_like(1, *SMALL), window(1, *SMALL, 2)
    clean = quantise(values, *base, backend=backend)
    values[1, 2, 40] = poison
    got = quantise(values, *base, backend=backend)
    assert_same_bits([part[0] for part in got], [part[0] for part in clean])
    assert np.isnan(got.scale).tolist() == [False, True]
    assert not got.codes[1].any() and not got.scales[1].any()
    chosen = np.zeros(SMALL[:2], bool)
    chosen[:, 1] = True
    packet = np.where(chosen[..., None], np.float32(0.5), np.full(SMALL, np.nan, np.float32))
    read = patch(got, *base, packet, chosen, np.ones(48, np.float32), eps=EPS, backend=backend)
    assert np.isfinite(read.states[0]).all() and np.isfinite(read.normed[0]).all()  # rows not chosen were not looked at
    for rows in (read.states[1], read.normed[1]):
        assert np.isnan(rows).all(-1).tolist() == np.isnan(rows).any(-1).tolist() == [True, False, True]
    assert np.isnan(read.change[1, 1]).all() and not np.asarray(read.change)[~chosen].any()


@pytest.mark.parametrize("backend", ROUTES)
def test_difference_that_overflows_counts_as_infinite(backend):
    base = Window(np.full((2, 2, 48), -3e38, np.float32), np.int32([[2, 2, 2], [2, 0, 2]]))
    got = quantise(np.full(SMALL, 3e38, np.float32), *base, backend=backend)
    assert np.isnan(got.scale).tolist() == [False, True] and not got.codes[1].any()


@pytest.mark.parametrize("backend", ROUTES)
def test_sequences_next_to_nothing_are_zeros(backend):
    values = np.zeros(SMALL, np.float32)
    values[:, 0, 3] = [2.1e-27, -2.2e-27]
    got = quantise(values, *dead(SMALL), backend=backend)
    assert (np.asarray(got.scale) > 0).tolist() == [False, True]
    assert np.asarray(got.codes).any((1, 2)).tolist() == [False, True]
    assert got.scales[1].tolist() == [[0x7E, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("backend", ROUTES)
def test_first_lane_is_in_the_low_bits(backend):
    values = np.broadcast_to(np.tile(np.float32([6, -0.5]), 24), SMALL)
    got = quantise(values, *dead(SMALL), backend=backend)
    assert set(got.codes.ravel().tolist()) == {0x97} and set(got.scales.ravel().tolist()) == {0x7E}


@functools.cache
def case(w: int, d: int, clusters: int, dtype: str, direct: bool):
    """Arguments of ``patched``, two sequences."""
    rng = np.random.default_rng(w + d)
    base = window(w, 2, w, d, clusters)
    stored = quantise(states_like(d, 2, w, d), *base, direct=direct, backend="xla")
    packet = jnp.asarray(rng.normal(size=(2, w, d)), dtype)
    return stored, *base, packet, rng.random((2, w)) < 0.5, jnp.asarray(rng.normal(size=d), dtype)


def assert_patched(got, args, direct: bool) -> None:
    """States and change by numpy; the norm by the model's own module."""
    stored, centroids, labels, packet, chosen, weight = args
    w, d = packet.shape[1:]
    step = np.asarray(stored.scale)[:, None, None] * E4M3.astype(np.float32)[stored.scales]
    codes = np.stack([stored.codes & 15, stored.codes >> 4], -1).reshape(2, w, d)
    before = E2M1.astype(np.float32)[codes] * np.repeat(step, 16, axis=-1)
    if not direct:
        before = before + Window(centroids, labels).rows()
    picked = chosen[..., None]
    states = np.where(picked, np.asarray(packet, np.float32), before)
    assert_same_bits(got[:2], (states, np.where(picked, states - before, np.float32(0))))
    norm = RMSNorm(d, EPS, dtype=packet.dtype)
    norm.weight[...] = weight
    want = norm(jnp.asarray(states, packet.dtype))
    assert got.normed.dtype == want.dtype == packet.dtype
    # Sums in another order, and then at most two roundings to the dtype.
    rtol = 2e-6 + (2 * float(jnp.finfo(packet.dtype).eps) if packet.dtype != jnp.float32 else 0)
    np.testing.assert_allclose(np.float32(got.normed), np.float32(want), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    ("w", "d", "clusters", "dtype", "direct"),
    [
        (1, 64, 1024, "float32", False),
        (7, 112, 3, "bfloat16", False),
        (*SMALL[1:], 2, "float32", True),
        (33, 48, 1, "float16", False),
    ],
)
def test_patched_rows_and_their_norm(w, d, clusters, dtype, direct):
    args = case(w, d, clusters, dtype, direct)
    for backend in ROUTES:
        assert_patched(patch(*args, eps=EPS, direct=direct, backend=backend), args, direct)


@pytest.mark.parametrize("share", [0, 1])
def test_packet_of_no_row_and_of_all(share):
    *args, chosen, weight = case(7, 112, 3, "bfloat16", False)
    args = (*args, np.full_like(chosen, share), weight)
    for backend in ROUTES:
        assert_patched(patch(*args, eps=EPS, backend=backend), args, False)


@pytest.mark.parametrize("shape", [s for s in shapes.WINDOWS if s.name == "dream-1-1"], ids=lambda shape: shape.name)
def test_named_shape(shape):
    check_shape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", shapes.WINDOWS, ids=lambda shape: shape.name)
def test_all_named_shapes(shape):
    check_shape(shape)


def check_shape(shape: shapes.WindowShape) -> None:
    args = case(shape.rows, shape.width, shape.clusters, "bfloat16", False)
    states = states_like(shape.width, 2, shape.rows, shape.width)
    values = states - Window(*args[1:3]).rows()
    for backend in ROUTES:
        got = quantise(states, *args[1:3], backend=backend)
        assert_same_bits(got, oracle(values))
        assert_patched(patch(*args, eps=EPS, backend=backend), args, False)


@pytest.mark.parametrize("form", ["nvfp4", "nvfp4_direct"])
def test_decoding_stores_the_same(form):
    direct = form == "nvfp4_direct"
    _, w, d = SMALL
    args = case(w, d, 2, "float32", direct)
    states, rows = states_like(d, *SMALL), Window(*args[1:3]).rows()
    stored = jax.jit(residuals.store, static_argnums=(2, 3))(states, rows, form, jnp.float32)
    assert_same_bits(stored, quantise(states, *args[1:3], direct=direct, backend="interpret"))
    nothing = np.zeros(SMALL[:2], bool)
    got = patch(stored, *args[1:4], nothing, args[5], eps=EPS, direct=direct, backend="interpret")
    assert_same_bits([got.states], [jax.jit(residuals.restore, static_argnums=2)(stored, rows, form)])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (dict(packet=jnp.zeros((2, 7, 112), jnp.int8)), "packet int8"),
        (dict(packet=jnp.zeros((2, 7, 40))), r"packet float32\[2, 7, 40\]: .*multiple of 16"),
        (dict(codes=np.zeros((2, 7, 112), np.uint8)), r"codes uint8\[2, 7, 112\]: need uint8\[2, 7, 56\]"),
        (dict(scales=np.zeros((2, 7, 7), np.float32)), r"scales float32\[2, 7, 7\]: need uint8"),
        (dict(chosen=np.zeros((2, 7), np.int32)), "chosen int32"),
        (dict(weight=jnp.ones(112, jnp.bfloat16)), "norm_weight bfloat16"),
        (
            dict(centroids=np.zeros((2, 0, 112), np.float32)),
            r"centroids float32\[2, 0, 112\]: need float32\[2, 1, 112\]",
        ),
        (dict(labels=np.zeros((2, 6), np.int32)), r"labels int32\[2, 6\]"),
    ],
)
def test_wrong_input_is_named(change, names):
    stored, *rest = case(7, 112, 3, "float32", False)
    given = (
        stored._asdict() | dict(zip(("centroids", "labels", "packet", "chosen", "weight"), rest, strict=True)) | change
    )
    codes, scales, scale, *rest = given.values()
    with pytest.raises(ValueError, match=names):
        patched(Nvfp4(codes, scales, scale), *rest, eps=EPS)
    if {"centroids", "labels"} & set(change):
        with pytest.raises(ValueError, match=names):
            quantised(jnp.zeros((2, 7, 112)), given["centroids"], given["labels"])


def test_states_must_be_float32():
    with pytest.raises(ValueError, match="states bfloat16"):
        quantised(jnp.zeros((1, 1, 16), jnp.bfloat16), *window(0, 1, 1, 16, 1))


@pytest.mark.parametrize(
    ("operation", "shape", "why"),
    [
        ("quantised", (2, 0, 32), "no rows"),
        ("patched", (2, 0, 32), "no rows"),
        ("patched", (1, 1, 16_384), "width 16384, more than 8192"),
        ("quantised", (1, 9000, 1024), "9000 parts of 1024"),
        ("quantised", (1, 70_000, 1024), "more than one launch can address"),
    ],
)
def test_what_no_kernel_serves(operation, shape, why):
    b, w, d = shape
    like = jax.ShapeDtypeStruct
    clusters = like((b, 1, d), "float32"), like((b, w), "int32")
    states = like(shape, "float32")
    if operation == "quantised":
        run, args = functools.partial(quantised), (states, *clusters)
    else:
        stored = Nvfp4(like((b, w, d // 2), "uint8"), like((b, w, d // 16), "uint8"), like((b,), "float32"))
        run = functools.partial(patched, eps=EPS)
        args = stored, *clusters, states, like((b, w), "bool"), like((d,), "float32")
    with pytest.raises(Unsupported, match=f"residual_{operation}: .*{why}"):
        jax.eval_shape(functools.partial(run, backend="interpret"), *args)
    assert jax.eval_shape(run, *args)[0].shape[:2] == (b, w)  # the definition does
