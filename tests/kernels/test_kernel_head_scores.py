"""The head's scores: definition against a float64 oracle, kernel (interpreted) against the definition."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import dispatch, shapes
from pallas_kernels.head_scores import VocabScores, head_scores, triton
from pallas_kernels.vocab_scores import vocab_scores

# Tiles so small that small cases have several along every axis, as real ones do. "interpret" keeps the real tiles.
SMALL = dict(MAX_ROWS=16, MAX_VOCAB=32, DEPTH_BYTES=64)
ROUTES = ("xla", "tiled")
# Products of up to 3584 float32 terms in either order, and sums of up to 152,064; probabilities lie in [0, 1].
TOLERANCE = dict(confidence=1e-5, margin=1e-5, neg_entropy=1e-4, lse=2e-5)


@functools.partial(jax.jit, static_argnames=("barred", "backend"))
def scored(rows, head, barred=(), backend="xla"):
    if backend != "tiled":
        return head_scores(rows, head, barred=barred, backend=backend)
    with mock.patch.multiple(triton, **SMALL):
        return head_scores(rows, head, barred=barred, backend="interpret")


def exact_logits(rows, head, barred: tuple[int, ...] = ()) -> np.ndarray:
    logits = np.asarray(rows, np.float64) @ np.asarray(head, np.float64)
    logits[..., list(barred)] = -np.inf
    return logits


def oracle(logits: np.ndarray) -> VocabScores:
    """The statistics by sorting, in float64."""
    top = logits.max(-1, keepdims=True)
    lse = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    p = np.exp(logits - lse[..., None])
    first, second = np.moveaxis(np.sort(np.concatenate([p, np.zeros_like(p[..., :1])], -1), -1)[..., :-3:-1], -1, 0)
    return VocabScores(logits.argmax(-1), first, first - second, (p * np.log(p + 1e-10)).sum(-1), lse)


def assert_scores(got: VocabScores, rows, head, barred: tuple[int, ...] = ()) -> None:
    """Against float64; the token is the best one, or as good within the rounding of a float32 product."""
    logits = exact_logits(rows, head, barred)
    want = oracle(logits)
    chosen = np.take_along_axis(logits, np.asarray(got.token)[..., None], -1)[..., 0]
    rounding = 4e-7 * np.sqrt(head.shape[0]) * np.abs(logits[np.isfinite(logits)]).max()
    assert (chosen >= logits.max(-1) - rounding).all()
    for field, atol in TOLERANCE.items():
        np.testing.assert_allclose(getattr(got, field), getattr(want, field), rtol=1e-5, atol=atol, err_msg=field)


def assert_equal(got: VocabScores, want: VocabScores) -> None:
    np.testing.assert_array_equal(got.token, want.token)
    for field, atol in TOLERANCE.items():
        np.testing.assert_allclose(getattr(got, field), getattr(want, field), rtol=1e-5, atol=atol, err_msg=field)


def random_case(seed: int, shape: tuple[int, ...], vocab: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Rows and head with logits of standard deviation 0.5 to 6, by row."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=shape) * rng.uniform(0.5, 6, size=(*shape[:-1], 1))
    head = rng.normal(size=(shape[-1], vocab)) / np.sqrt(shape[-1])
    return jnp.asarray(rows, dtype), jnp.asarray(head, dtype)


def every(*cases):
    """Each as (leading shape of the rows, depth, vocabulary, dtype)."""
    return pytest.mark.parametrize(("lead", "depth", "vocab", "dtype"), cases)


# Ends of rows, depth and vocabulary on and off a tile's, each dtype; more of them, and real sizes, in the slow tests.
@every(((), 64, 416, "float32"), ((2, 16), 72, 260, "bfloat16"), ((65,), 72, 17, "float16"))
def test_b51_any_shape_interpret_equals_definition(lead, depth, vocab, dtype):
    x, w = random_case(depth, (*lead, depth), vocab, dtype)
    barred = (1, 2, 7)
    want = scored(x, w, barred)
    assert_scores(want, x, w, barred)
    got = scored(x, w, barred, backend="tiled")
    assert_scores(got, x, w, barred)
    assert_equal(got, want)
    assert {field.shape for field in got} == {lead}
    assert [str(field.dtype) for field in got] == ["int32", *["float32"] * 4]


@every(((33,), 72, 260, "float32"))
def test_real_tiles(lead, depth, vocab, dtype):
    x, w = random_case(depth, (*lead, depth), vocab, dtype)
    got = scored(x, w, (0, 5), backend="interpret")
    assert_scores(got, x, w, (0, 5))


@pytest.mark.slow
@every(
    ((1,), 64, 416, "bfloat16"),
    ((5,), 1, 1, "float32"),
    ((32,), 128, 416, "bfloat16"),
    ((33,), 64, 131, "float16"),
    ((64,), 64, 129, "float32"),
    ((96,), 72, 260, "float32"),
)
def test_more_shapes(lead, depth, vocab, dtype):
    x, w = random_case(depth, (*lead, depth), vocab, dtype)
    want = scored(x, w)
    for backend in ("tiled", "interpret"):
        got = scored(x, w, backend=backend)
        assert_scores(got, x, w)
        assert_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [s for s in shapes.HEAD_SCORES if s.rows in (1, 33)], ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_named_real_shapes(shape, dtype):
    """Real depths and vocabularies, one at a time: of the other a part, odd in size."""
    for depth, vocab, barred in ((shape.depth, 1031, ()), (72, shape.vocab, shape.barred)):
        x, w = random_case(shape.rows, (shape.rows, depth), vocab, dtype)
        want = scored(x, w, barred)
        assert_scores(want, x, w, barred)
        with mock.patch.multiple(triton, MAX_VOCAB=8192, DEPTH_BYTES=512):
            got = jax.jit(lambda x, w, barred=barred: head_scores(x, w, barred=barred, backend="interpret"))(x, w)
        assert_equal(got, want)


def test_definition_is_the_product_and_its_scores():
    def written_out(x, w):
        logits = jnp.einsum("...d,dv->...v", x, w, preferred_element_type=jnp.float32)
        return vocab_scores(logits, barred=(4,), backend="xla")

    args = random_case(3, (2, 3, 40), 90)
    assert str(jax.make_jaxpr(lambda x, w: head_scores(x, w, barred=(4,)))(*args)) == str(
        jax.make_jaxpr(written_out)(*args)
    )


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (32, 1), (33, 1), (64, 1), (65, 2), (96, 2)])
def test_up_to_64_rows_read_the_head_once(rows, tiles):
    head = jax.ShapeDtypeStruct((4096, 126_464), jnp.bfloat16)
    plan = triton.plan(jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), head, (), 0, interpret=False)
    assert -(-rows // plan.row_tile) == tiles
    assert plan.row_tile <= max(16, 2 * rows - 1)  # no more padding than powers of two need


def test_float32_is_multiplied_in_full():
    x, w = random_case(2, (4, 16), 16)
    program = str(jax.make_jaxpr(lambda x, w: head_scores(x, w, backend="interpret"))(x, w))
    assert "dot_general" in program and "Precision.HIGHEST" in program


# One shape for all properties, so that each route is compiled once: 4 rows of depth 20, 70 ids, 3 x 2 tiles.
BARRED = (*range(32), 35, 36, 69)  # a whole tile, and more
LEVELS = (
    hnp.arrays(np.int8, (4, 20), elements=st.integers(-2, 2)),
    hnp.arrays(np.int8, (20, 70), elements=st.integers(-2, 2)),
)


@settings(max_examples=30, deadline=None)
@given(*LEVELS)
def test_ties_go_to_the_lowest_id(rows, head):
    logits = rows.astype(int) @ head  # small integers: every route multiplies them exactly
    tied = (logits == logits.max(-1, keepdims=True)).sum(-1) > 1
    for backend in ROUTES:
        got = scored(rows.astype(np.float32), head.astype(np.float32), backend=backend)
        assert got.token.tolist() == logits.argmax(-1).tolist()
        assert ((np.asarray(got.margin) == 0) == tied).all()


def test_ties_across_tiles_go_to_the_lowest_id():
    """The best logit twice, tiles apart, and once more as the only other one."""
    head = np.zeros((20, 70), np.float32)
    head[0, [33, 68]] = head[1, [66, 2]] = head[2, [40, 41]] = 7
    rows = np.eye(4, 20, dtype=np.float32)
    for backend in ROUTES:
        got = scored(rows, head, backend=backend)
        assert got.token.tolist() == [33, 2, 40, 0]
        assert got.margin.tolist() == [0, 0, 0, 0]
        assert_scores(got, rows, head)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 1e-3, 1.0, 10.0]))
def test_softmax_invariants_and_barred_ids(seed, scale):
    x, w = random_case(seed, (4, 20), 70)
    x = x * scale
    allowed = 70 - len(BARRED)
    for backend in ROUTES:
        got = jax.tree.map(np.asarray, scored(x, w, BARRED, backend=backend))
        assert not np.isin(got.token, BARRED).any()
        assert ((got.confidence >= 1 / allowed - 1e-6) & (got.confidence <= 1 + 1e-6)).all()
        assert ((got.margin >= 0) & (got.margin <= got.confidence)).all()
        assert ((got.neg_entropy >= -np.log(allowed) - 1e-5) & (got.neg_entropy <= 1e-5)).all()
        assert_scores(got, x, w, BARRED)


@pytest.mark.parametrize("backend", ROUTES)
def test_rows_without_a_distribution_say_so(backend):
    """NaN rows, logits that overflow to +inf and rows of -inf alone; an id of -inf beside finite ones counts for 0."""
    head = np.ones((20, 70), np.float32)
    head[0] = 2.0
    head[0, 40] = 8.0
    head[1] = 0.0
    head[1, 50] = -8.0
    rows = np.zeros((4, 20), np.float32)
    rows[0, 3] = np.nan
    rows[1, 0] = 6e37  # id 40 overflows, the others do not
    rows[2, 0] = -3.4e38  # all overflow downwards
    rows[3, 1] = 1e38  # id 50 overflows downwards
    got = scored(rows, head, BARRED, backend=backend)
    for field in (got.confidence, got.margin, got.neg_entropy):
        assert np.isnan(field).tolist() == [True, True, True, False]
    assert got.lse[2] == -np.inf
    assert got.confidence[3] == np.float32(1 / 34) and got.margin[3] == 0 and got.token[3] == 32
    assert not np.isin(got.token, BARRED).any() and all(0 <= token < 70 for token in got.token.tolist())


@pytest.mark.parametrize("backend", ROUTES)
def test_one_nan_weight_is_never_a_confident_token(backend):
    """Wherever in the vocabulary it is, unless its id is barred."""
    for token, barred in ((33, ()), (69, ()), (69, BARRED)):
        x, w = random_case(token, (4, 20), 70)
        got = scored(x, w.at[7, token].set(jnp.nan), barred, backend=backend)
        assert np.isnan(np.stack(got[1:4])).all() == (token not in barred)
        assert np.isfinite(np.stack(got[1:4])).all() == (token in barred)


def test_unserved_calls_name_the_reason_in_one_line():
    x, w = np.zeros((2, 16), np.float32), np.zeros((16, 60), np.float32)
    cases = [
        (x[:0], w, (), "head_scores: no rows"),
        (x, w.astype(jnp.bfloat16), (), "head_scores: rows of dtype float32 and head of dtype bfloat16 differ"),
        (x, w, tuple(range(0, 60, 2)), "head_scores: barred ids form 30 separate ranges, more than 16"),
    ]
    for rows, head, barred, reason in cases:
        with pytest.raises(dispatch.Unsupported) as refused:
            head_scores(rows, head, barred=barred, backend="interpret")
        assert str(refused.value) == reason
        with dispatch.using("interpret"):  # not binding: the definition runs
            got = jax.eval_shape(lambda x, w, barred=barred: head_scores(x, w, barred=barred), rows, head)
            assert got.token.shape == rows.shape[:1]
    huge = jax.ShapeDtypeStruct((65_536, 32_768), jnp.bfloat16)
    with pytest.raises(dispatch.Unsupported, match=r"head \[65536, 32768\] of more than 2147483647 elements"):
        triton.plan(jax.ShapeDtypeStruct((1, 65_536), jnp.bfloat16), huge, (), 0, interpret=True)


@pytest.mark.parametrize(
    ("rows", "head", "barred", "names"),
    [
        (
            np.zeros((2, 5), np.float32),
            np.zeros((5, 4), np.float32),
            (4,),
            "barred id 4 is outside the vocabulary of 4",
        ),
        (np.zeros((2, 5), np.float32), np.zeros((5, 2), np.float32), (0, 1), "all 2 ids are barred"),
        (np.zeros((2, 5), np.float32), np.zeros((4, 5), np.float32), (), r"rows \[2, 5\] and head \[4, 5\]"),
        (np.zeros((2, 5), np.float32), np.zeros((5, 0), np.float32), (), r"head \[5, 0\]"),
        (np.zeros((2, 0), np.float32), np.zeros((0, 5), np.float32), (), r"head \[0, 5\]"),
        (np.zeros((2, 5), np.float32), np.zeros(5, np.float32), (), r"head \[5\]"),
        (np.float32(3), np.zeros((5, 4), np.float32), (), r"rows \[\]"),
        (np.zeros((2, 5), np.int32), np.zeros((5, 4), np.float32), (), "rows int32"),
        (np.zeros((2, 5), np.float32), np.zeros((5, 4), np.int8), (), "head int8"),
    ],
)
def test_wrong_input_is_named(rows, head, barred, names):
    with pytest.raises(ValueError, match=names):
        head_scores(rows, head, barred=barred)
