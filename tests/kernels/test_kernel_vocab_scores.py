"""The vocabulary scores: definition against a float64 oracle, kernel (interpreted) against the definition."""

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

from pallas_kernels import shapes
from pallas_kernels.vocab_scores import VocabScores, triton, vocab_scores

# "looped" is the interpreted kernel with blocks so small that every lane sees several logits, as on real vocabularies.
ROUTES = ("xla", "interpret", "looped")
# Sums of up to 152,064 float32 terms in either order; probabilities lie in [0, 1].
TOLERANCE = dict(confidence=2e-6, margin=2e-6, neg_entropy=5e-5, lse=2e-5)


def oracle(logits: np.ndarray, barred: tuple[int, ...] = ()) -> VocabScores:
    """The same statistics by sorting, in float64."""
    s = logits.astype(np.float64)
    s[..., list(barred)] = -np.inf
    top = s.max(-1, keepdims=True)
    lse = top[..., 0] + np.log(np.exp(s - top).sum(-1))
    p = np.exp(s - lse[..., None])
    first, second = np.moveaxis(np.sort(np.concatenate([p, np.zeros_like(p[..., :1])], -1), -1)[..., :-3:-1], -1, 0)
    return VocabScores(s.argmax(-1), first, first - second, (p * np.log(p + 1e-10)).sum(-1), lse)


@functools.partial(jax.jit, static_argnames=("barred", "backend"))
def scored(logits, barred=(), backend="xla"):
    if backend != "looped":
        return vocab_scores(logits, barred=barred, backend=backend)
    with mock.patch.multiple(triton, MAX_BLOCK=32, PROGRAMS=8):
        return vocab_scores(logits, barred=barred, backend="interpret")


def assert_scores(got: VocabScores, want: VocabScores, vocab: int, *, kernel: bool) -> None:
    np.testing.assert_array_equal(got.token, want.token)
    for field, atol in TOLERANCE.items():
        # The kernel leaves out Dream's 1e-10, which lowers neg_entropy by at most vocab * 1e-10.
        atol += vocab * 1e-10 if kernel and field == "neg_entropy" else 0
        np.testing.assert_allclose(getattr(got, field), getattr(want, field), rtol=2e-6, atol=atol, err_msg=field)


def random_logits(seed: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32) * rng.uniform(0.5, 8, size=(*shape[:-1], 1)).astype(np.float32)


@pytest.mark.parametrize("backend", ROUTES)
@pytest.mark.parametrize("vocab", [1, 32, 33, 260, 1024, 3001])
def test_matches_oracle_for_every_vocabulary_tail(vocab, backend):
    logits = random_logits(vocab, 5, vocab)
    assert_scores(scored(logits, backend=backend), oracle(logits), vocab, kernel=backend != "xla")


@pytest.mark.parametrize("rows", [1, 7, 32, 33])
def test_b51_rows_of_any_number_interpret_equals_definition(rows):
    logits = random_logits(rows, rows, 416)
    got = scored(logits, barred=(1, 2, 7), backend="interpret")
    assert_scores(got, oracle(logits, (1, 2, 7)), 416, kernel=True)
    assert_scores(got, scored(logits, barred=(1, 2, 7)), 416, kernel=True)


@pytest.mark.parametrize(
    "shape", [s for s in shapes.VOCAB_SCORES if s.vocab <= 1024 and s.rows in (8, 64)], ids=lambda s: s.name
)
def test_named_small_shapes(shape):
    logits = random_logits(shape.rows, shape.rows, shape.vocab)
    for backend in ROUTES:
        got = scored(logits, barred=shape.barred, backend=backend)
        assert_scores(got, oracle(logits, shape.barred), shape.vocab, kernel=backend != "xla")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [s for s in shapes.VOCAB_SCORES if s.vocab > 1024 and s.rows in (1, 8)], ids=lambda s: s.name
)
def test_named_real_shapes(shape):
    logits = random_logits(shape.rows, shape.rows, shape.vocab)
    for backend in ("xla", "interpret"):
        got = scored(logits, barred=shape.barred, backend=backend)
        assert_scores(got, oracle(logits, shape.barred), shape.vocab, kernel=backend != "xla")


@pytest.mark.parametrize("backend", ROUTES)
def test_hard_rows(backend):
    v = 2100
    equal = np.zeros(v)
    extreme = np.where(np.arange(v) % 3 == 0, 120.0, -120.0)
    far = np.full(v, -np.inf)
    far[2050] = -3.5
    two = np.full(v, -np.inf)
    two[[5, 2000]] = 88.0
    late = np.linspace(-120, 120, v)
    pair = np.zeros(v)  # the two best ids are a multiple of any block apart, so that one lane sees both
    pair[[3, 3 + 1024]] = 10, 9
    reverse = np.zeros(v)
    reverse[[3, 3 + 1024]] = 9, 10
    logits = np.stack([equal, extreme, far, two, late, late[::-1], pair, reverse]).astype(np.float32)
    got, want = scored(logits, backend=backend), oracle(logits)
    assert_scores(got, want, v, kernel=backend != "xla")
    assert np.isfinite(np.stack(got)).all()
    assert got.token.tolist() == [0, 0, 2050, 5, v - 1, 0, 3, 1027]
    np.testing.assert_array_equal(got.margin[:4], [0, 0, 1, 0])
    assert got.confidence[2] == 1 and got.neg_entropy[2] == 0


@pytest.mark.parametrize("backend", ROUTES)
def test_rows_without_a_distribution_say_so(backend):
    nothing = np.full(300, -np.inf, np.float32)
    nan, infinite = np.zeros((2, 300), np.float32)
    nan[7], infinite[7] = np.nan, np.inf
    got = scored(np.stack([nothing, nan, infinite, np.zeros(300, np.float32)]), barred=(0, 1), backend=backend)
    for field in (got.confidence, got.margin, got.neg_entropy):
        assert np.isnan(field).tolist() == [True, True, True, False]
    assert got.lse[0] == -np.inf
    assert all(2 <= token < 300 for token in got.token.tolist())


@pytest.mark.parametrize("backend", ROUTES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_are_scored_in_float32(dtype, backend):
    logits = jnp.asarray(random_logits(3, 4, 700), dtype)
    got = scored(logits, backend=backend)
    assert_scores(got, oracle(np.asarray(logits, np.float32)), 700, kernel=backend != "xla")
    assert [str(field.dtype) for field in got] == ["int32", *["float32"] * 4]


@pytest.mark.parametrize("backend", ROUTES)
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_leading_shape_is_kept(lead, backend):
    logits = random_logits(9, *lead, 130)
    got = scored(logits, backend=backend)
    assert {field.shape for field in got} == {lead}
    assert_scores(got, oracle(logits), 130, kernel=backend != "xla")


def test_no_rows():
    assert {field.shape for field in vocab_scores(jnp.zeros((2, 0, 5)))} == {(2, 0)}


LOGITS = hnp.arrays(
    np.float32,
    (4, 70),
    elements=st.floats(-120, 120, width=32) | st.sampled_from([0.0, 1.0, 1.0, -np.inf]).map(np.float32),
).map(lambda x: np.where(np.arange(70) == 11, np.maximum(x, -120), x))  # each row has a finite allowed logit
BARRED = (0, 3, 4, 5, 69)


@settings(max_examples=30, deadline=None)
@given(LOGITS)
def test_softmax_invariants(logits):
    for backend in ROUTES:
        got = jax.tree.map(np.asarray, scored(logits, backend=backend))
        assert ((got.confidence >= 1 / 70 - 1e-6) & (got.confidence <= 1 + 1e-6)).all()
        assert ((got.margin >= 0) & (got.margin <= got.confidence)).all()
        assert ((got.neg_entropy >= -np.log(70) - 1e-5) & (got.neg_entropy <= 1e-5)).all()
        assert (got.lse >= logits.max(-1) - 1e-5).all()
        assert_scores(got, oracle(logits), 70, kernel=backend != "xla")


@settings(max_examples=30, deadline=None)
@given(LOGITS, st.sampled_from([-64.0, -1.5, 0.25, 32.0]))
def test_shift_moves_only_the_log_sum_exp(logits, shift):
    logits = np.round(logits * 8) / 8  # so that adding the shift is exact
    for backend in ROUTES:
        plain, moved = scored(logits, backend=backend), scored(logits + np.float32(shift), backend=backend)
        want = plain._replace(lse=plain.lse + shift)
        assert_scores(moved, want, 70, kernel=False)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.int8, (4, 70), elements=st.integers(-2, 2)))
def test_ties_go_to_the_lowest_id(levels):
    logits = levels.astype(np.float32)
    for backend in ROUTES:
        got = scored(logits, backend=backend)
        assert got.token.tolist() == [row.tolist().index(row.max()) for row in levels]
        tied = (levels == levels.max(-1, keepdims=True)).sum(-1) > 1
        assert ((np.asarray(got.margin) == 0) == tied).all()


@settings(max_examples=30, deadline=None)
@given(LOGITS)
def test_barred_ids_are_never_chosen_and_count_for_nothing(logits):
    allowed = np.setdiff1d(np.arange(70), BARRED)
    want = oracle(logits[:, allowed])
    want = want._replace(token=allowed[want.token])
    for backend in ROUTES:
        assert_scores(scored(logits, barred=BARRED, backend=backend), want, 70, kernel=backend != "xla")


@pytest.mark.parametrize(
    ("logits", "barred", "names"),
    [
        (np.zeros((2, 5), np.float32), (5,), "barred id 5 is outside the vocabulary of 5"),
        (np.zeros((2, 5), np.float32), (-1,), "barred id -1"),
        (np.zeros((2, 2), np.float32), (0, 1), "all 2 ids are barred"),
        (np.zeros((2, 5), np.int32), (), "int32"),
        (np.zeros((2, 0), np.float32), (), r"\[2, 0\]"),
        (np.float32(3), (), "float32"),
    ],
)
def test_wrong_input_is_named(logits, barred, names):
    with pytest.raises(ValueError, match=names):
        vocab_scores(logits, barred=barred)
