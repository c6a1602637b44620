"""Sparse-dLLM against a NumPy oracle of its specification, pass for pass, and its own properties."""

from __future__ import annotations

import dataclasses
import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import decoders
from polestar_jax.cache import DualCache, SparseCache
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.models.attention import as_keys, as_values
from tests.fakes import DREAM, MASK, SPEC, lively_model
from tests.oracles.numpy_model import attention, of_denoiser, rms_norm, rotate
from tests.oracles.sublayers import largest, probabilities

PROMPTS = [[3, 1, 4, 1, 5], [2], list(range(1, 20))]
G, BLOCK = 16, 8


class Sparse:
    """A sequence's passes: lists of columns, in float64."""

    def __init__(self, model, prompt: int, keep: float, pool: int):
        self.ref, self.shift, self.p = of_denoiser(model), model.spec.logit_shift, prompt
        self.keep, self.pool, self.kept = fractions.Fraction(str(keep)), pool, []

    def forward(self, tokens: np.ndarray, rows: list[int], block: list[int], *, build: bool) -> np.ndarray:
        """Logits of ``rows`` [r, v], which see each other and what is kept; ``build``: keep the best columns for ``block``."""
        ref, n, last = self.ref, len(tokens), self.kept
        x, self.kept = ref.embedding[tokens[rows]], [] if build else last
        for i, w in enumerate(ref.layers):
            normed = rms_norm(x, w["attn_norm"], ref.eps)
            q, k, v = (normed @ w[name].T + w.get(f"{name}_bias", 0) for name in "qkv")
            q = rotate(q.reshape(len(rows), ref.n_heads, -1), np.array(rows), ref.theta)
            k = rotate(k.reshape(len(rows), ref.n_kv_heads, -1), np.array(rows), ref.theta)
            v = v.reshape(len(rows), ref.n_kv_heads, -1)
            if build:
                columns = self.best(q[block], k, [c for c in range(n) if not block[0] - self.shift <= c <= block[-1]])
                self.kept.append((k[columns], v[columns], columns))
            elif last:
                k, v = np.concatenate([last[i][0], k]), np.concatenate([last[i][1], v])
            x = x + attention(q, k, v, None).reshape(len(rows), -1) @ w["out"].T
            normed = rms_norm(x, w["mlp_norm"], ref.eps)
            gate = normed @ w["gate"].T
            x = x + gate / (1 + np.exp(-gate)) * (normed @ w["up"].T) @ w["down"].T
        return rms_norm(x, ref.norm, ref.eps) @ ref.head.T

    def best(self, q: np.ndarray, k: np.ndarray, outside: list[int]) -> list[int]:
        group = q.shape[1] // k.shape[1]
        one = [np.mean([q.mean(axis=0)[h] @ k[c, h // group] for h in range(q.shape[1])]) for c in outside]
        half = self.pool // 2
        pooled = np.array([max(one[max(j - half, 0) : j + half + 1]) for j in range(len(one))])
        count = int(self.keep * len(outside))
        return sorted(outside[j] for j in largest(pooled, count, list(range(len(outside)))))


def oracle(model, prompt: list[int], keep: float, pool: int) -> tuple[list, int, list]:
    """Of one token a pass: the generated tokens after each pass, the rows of all passes, each block's kept columns by layer."""
    walk, shift, p = Sparse(model, len(prompt), keep, pool), model.spec.logit_shift, len(prompt)
    tokens, history, rows, kept = np.array(prompt + [MASK] * G), [], 0, []
    for start in range(p, p + G, BLOCK):
        block = list(range(start, start + BLOCK))
        for step in range(BLOCK):
            walk.kept = [] if step == 0 else walk.kept
            here = list(range(len(tokens))) if step < 2 else list(range(start - shift, start + BLOCK))
            logits = walk.forward(tokens, here, block, build=step == 1)
            if step == 1:
                kept.append([columns for _, _, columns in walk.kept])
            at = start - shift - here[0]
            answers = probabilities(logits[at : at + BLOCK], MASK)
            best = largest(answers.max(axis=1), 1, [i for i in range(BLOCK) if tokens[start + i] == MASK])[0]
            tokens[start + best] = np.argmax(answers[best])
            history.append(tokens[p:].copy())
            rows += len(here)
    return history, rows, kept


def decoded(model, decoder, pads: int | None = None):
    """(the final state, the generated tokens after each pass of each sequence)."""
    decoder = decoder.replace(trace=Trace("tokens"))
    state = engine.init_state(model, decoder, PROMPTS)
    if pads is not None:
        state = state.replace(tokens=jnp.where(state.positions < 0, pads, state.tokens))
    state = engine.decode(model, decoder, state)
    return state, [np.asarray(state.trace["tokens"])[: int(state.nfe[i]), i] for i in range(len(PROMPTS))]


RUNS = [
    (SPEC, 0.5, 3),
    *(
        pytest.param(spec, keep, pool, marks=pytest.mark.slow)
        for spec, keep, pool in ((DREAM, 0.5, 3), (SPEC, 0.29, 1), (DREAM, 0.8, 5), (SPEC, 0.0, 3))
    ),
]


@pytest.mark.parametrize(("spec", "keep", "pool"), RUNS)
def test_every_pass_equals_the_oracle_in_a_batch_whatever_its_padding(spec, keep, pool):
    decoder = decoders.sparse_dllm(gen_length=G, block_length=BLOCK, keep_ratio=keep, pool_width=pool)
    assert decoder == decoders.sparse_dllm(gen_length=G, block_length=BLOCK) or (keep, pool) != (0.5, 3)
    for seed, pads in ((1, None), (2, MASK)):
        model = lively_model(spec, seed)
        state, ours = decoded(model, decoder, pads)
        assert state.full_forwards.tolist() == [4] * 3 and state.partial_forwards.tolist() == [12] * 3
        for i, prompt in enumerate(PROMPTS):
            theirs, rows, kept = oracle(model, prompt, keep, pool)
            np.testing.assert_array_equal(ours[i], theirs)
            assert int(state.rows[i]) == rows
            for layer, columns in zip(state.cache, kept[-1], strict=True):
                mine = np.asarray(layer.columns[i])[np.asarray(layer.live[i])] - int(state.pad[i])
                assert sorted(mine.tolist()) == columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPassDual(DualCache):
    """The dual cache, entered with two passes."""

    def wants(self, spec, state):
        return jnp.where(state.span_passes < 2, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, pytest.param(DREAM, id="dream")])
def test_all_kept_is_the_dual_cache_entered_twice(spec):
    sparse = decoders.sparse_dllm(gen_length=G, block_length=BLOCK, keep_ratio=1.0)
    dual = sparse.replace(cache=TwoPassDual(block_length=BLOCK))
    for seed in (0, 3):
        model = lively_model(spec, seed)
        (state, ours), (other, theirs) = (decoded(model, decoder) for decoder in (sparse, dual))
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(state.rows, other.rows)


@pytest.mark.slow
def test_a_block_of_one_pass_leaves_no_cache():
    decoder = decoders.sparse_dllm(gen_length=G, block_length=BLOCK, steps=2)
    model = lively_model(SPEC, 4)
    state, ours = decoded(model, decoder)
    assert state.nfe.tolist() == state.full_forwards.tolist() == [2] * 3
    _, theirs = decoded(model, decoders.vanilla(gen_length=G, block_length=BLOCK, steps=2))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("spec", [SPEC, DREAM])
def test_padding_hidden_columns_and_the_block_are_never_kept_and_the_share_is_of_what_there_is(spec):
    rng = np.random.default_rng(3)
    model = lively_model(spec)
    cache = SparseCache(block_length=BLOCK, keep_ratio=0.7, pool_width=3)
    decoder = decoders.sparse_dllm(gen_length=G, block_length=BLOCK)
    state = engine.init_state(model, decoder, PROMPTS)
    n = state.tokens.shape[1]
    q, k, v = (
        jnp.asarray(rng.normal(size=(3, n, heads, spec.head_dim)), jnp.float32)
        for heads in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
    )
    start = jnp.array([0, 8, 4], jnp.int32)
    hidden = np.zeros((3, n), bool)
    hidden[1, n - 20] = hidden[2, n - 2] = True
    state = state.replace(span_start=start, span_end=start + jnp.array([8, 8, 5]), hidden=jnp.asarray(hidden))
    few = jax.jit(lambda *args: cache.sifted(spec, *args))(state, q, as_keys(k), as_values(v))
    for i in range(3):
        columns = np.asarray(few.columns[i])[np.asarray(few.live[i])]
        first, end = (n - G + int(x[i]) for x in (state.span_start - spec.logit_shift, state.span_end))
        outside = [c for c in range(int(state.pad[i]), n) if not first <= c < end and not hidden[i, c]]
        assert set(columns) <= set(outside) and len(set(columns)) == len(columns) == len(outside) * 7 // 10
        np.testing.assert_array_equal(
            few.k[i][:, np.asarray(few.live[i])], np.moveaxis(np.asarray(k[i, columns]), 1, 0)
        )
        np.testing.assert_array_equal(
            few.v[i][:, :, np.asarray(few.live[i])], np.moveaxis(np.asarray(v[i, columns]), 0, 2)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(keep_ratio=1.1), "keep_ratio.1.1 is not accepted: a number >= 0 and <= 1"),
        (dict(pool_width=2), "pool_width 2 is not accepted: an odd number >= 1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    for build in (
        decoders.sparse_dllm,
        lambda **given: SparseCache(**dict(block_length=8, keep_ratio=0.5, pool_width=3) | given),
    ):
        with pytest.raises(InputError, match=message):
            build(**settings)
