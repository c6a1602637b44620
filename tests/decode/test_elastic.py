"""Elastic-Cache against a plain loop of its description with lists of rows, and the properties it promises."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import cache, decoders
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.generation import generate
from tests.fakes import DREAM, SPEC, lively_model
from tests.oracles import cached
from tests.oracles.numpy_model import rms_norm, rotate

PROMPTS = [[3, 1, 4, 1, 5], [2], list(range(1, 20))]
DEEP = dataclasses.replace(DREAM, n_layers=3)  # with a layer above one that has begun to be computed in full
G = 16
SETTINGS = dict(gen_length=G, sliding_window=5, gamma=0.93, threshold=0.75)


@functools.cache
def model_of(spec, seed=1):
    return lively_model(spec, seed)


class Elastic(cached.Run):
    """One sequence; each layer's last known inputs, queries, keys and values, and its tracked positions."""

    def __init__(self, model, prompt, settings):
        super().__init__(model, prompt, settings["gen_length"])
        n, layers = len(self.tokens), len(self.ref.layers)
        self.window, self.gamma = settings["sliding_window"], settings["gamma"]
        self.count, self.axis = settings.get("tracked", 1), settings.get("sim_axis", "keys")
        self.block = settings.get("block_length", self.g)
        self.inputs = [np.zeros((n, self.spec.d_model)) for _ in range(layers)]
        self.queries = [np.zeros((n, self.ref.n_heads, self.spec.head_dim)) for _ in range(layers)]
        self.tracked = [[] for _ in range(layers)]
        self.refreshes, self.begun = 0, []  # passes that refreshed, and the first layer that each pass computed in full

    def project(self, i, rows, x):
        """Write the rows' inputs, queries, keys and values of a layer."""
        w, at = self.ref.layers[i], np.array(rows)
        normed = rms_norm(x, w["attn_norm"], self.ref.eps)
        q, k, v = (normed @ w[name].T + w.get(f"{name}_bias", 0) for name in "qkv")
        self.inputs[i][at] = x
        self.queries[i][at] = rotate(q.reshape(len(at), self.ref.n_heads, -1), at, self.ref.theta)
        self.keys[i][at] = rotate(k.reshape(len(at), self.ref.n_kv_heads, -1), at, self.ref.theta)
        self.values[i][at] = v.reshape(len(at), self.ref.n_kv_heads, -1)

    def attention(self, q, k):
        """Probabilities [h, rows, n] of queries [rows, h, e] over keys [n, g, e]."""
        group = q.shape[1] // k.shape[1]
        scores = np.stack([q[:, j] @ k[:, j // group].T for j in range(q.shape[1])]) / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    def finish(self, i, rows, x):
        w, at = self.ref.layers[i], np.array(rows)
        weights = self.attention(self.queries[i][at], self.keys[i])
        group = self.ref.n_heads // self.ref.n_kv_heads
        heads = np.stack([weights[j] @ self.values[i][:, j // group] for j in range(self.ref.n_heads)], axis=1)
        x = x + heads.reshape(len(at), -1) @ w["out"].T
        normed = rms_norm(x, w["mlp_norm"], self.ref.eps)
        gate = normed @ w["gate"].T
        return x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T

    def alike(self, before, now):
        """Mean cosine of two [h, t, n]."""
        axis = 2 if self.axis == "keys" else 0
        norms = [np.maximum(np.linalg.norm(a, axis=axis), 1e-8) for a in (before, now)]
        return ((before * now).sum(axis=axis) / (norms[0] * norms[1])).mean()

    def advance(self):
        """One pass: what the window's rows say, by position."""
        n, layers, p = len(self.tokens), len(self.ref.layers), self.p
        end = (self.undecided[0] // self.block + 1) * self.block
        window = [p + i - self.shift for i in self.undecided if i < end][: self.window]
        everything = list(range(n))
        if self.nfe == 0:
            rows, first = everything, 0
        else:
            new = [p + i for i in range(self.g) if self.committed_at[i] == self.nfe - 1]
            rows, first = sorted({*new, *window, *(j for layer in self.tracked for j in layer)}), layers
        x = self.ref.embedding[self.tokens[rows]]
        for i in range(layers):
            if i == first and self.nfe:
                self.inputs[i][rows] = x
                rows, x = everything, self.inputs[i].copy()
            tracked = self.tracked[i]
            before = self.attention(self.queries[i][tracked], self.keys[i]) if self.nfe else None
            self.project(i, rows, x)
            self.rows += len(rows) / layers
            if first == layers and self.nfe:
                alike = self.alike(before, self.attention(self.queries[i][tracked], self.keys[i]))
                assert abs(alike - self.gamma) > 1e-5, "too near to tell"
                first = i + 1 if alike < self.gamma else first
            sums = self.attention(self.queries[i][window], self.keys[i]).sum(axis=(0, 1))
            decided = [j for j in range(n) if self.tokens[j] != self.spec.mask_id]
            self.tracked[i] = sorted(decided, key=lambda j: (-sums[j], j))[: self.count]
            x = self.finish(i, rows, x)
        self.full += self.nfe == 0
        self.refreshes += self.nfe > 0 and first < layers
        self.begun.append(first)
        x = x[[rows.index(j) for j in window]]
        logits = rms_norm(x, self.ref.norm, self.ref.eps) @ self.ref.head.T
        logits[:, self.spec.mask_id] = -np.inf
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        return {
            j - p + self.shift: cached.Guess(int(c.argmax()), float(c.max()), 0.0)
            for j, c in zip(window, scores, strict=True)
        }


def plain(model, prompt, settings):
    run = Elastic(model, prompt, settings)
    rule = cached.above(settings["threshold"])
    while run.undecided:
        guesses = run.advance()
        run.commit(rule(run, guesses), guesses)
    return run


def decoded(model, decoder, prompts=PROMPTS):
    decoder = decoder.replace(trace=Trace("tokens", "committed"))
    return generate(model, None, prompts, decoder, batch_size=len(prompts))


def check(spec, seeds, **settings):
    """All prompts together equal their plain loops pass for pass; the loops."""
    settings = SETTINGS | settings
    runs = []
    for seed in seeds:
        model = model_of(spec, seed)
        runs += [plain(model, prompt, settings) for prompt in PROMPTS]
        for run, answer in zip(runs[-len(PROMPTS) :], decoded(model, decoders.elastic_cache(**settings)), strict=True):
            np.testing.assert_array_equal(answer.trace["tokens"], run.history)
            for before, row in zip([[SPEC.mask_id] * G, *run.history], answer.trace["committed"], strict=False):
                window = np.flatnonzero(np.equal(before, SPEC.mask_id))[: settings["sliding_window"]]
                assert set(np.flatnonzero(row)) <= set(window)
            stats = answer.stats
            assert (stats.nfe, stats.full_forwards, stats.refreshes) == (run.nfe, 1, run.refreshes)
            assert stats.rows == pytest.approx(run.rows)
    return runs


@pytest.mark.parametrize("spec", [pytest.param(SPEC, marks=pytest.mark.slow), DEEP], ids=["llada", "dream"])
def test_equals_a_plain_loop(spec):
    runs = check(spec, (1, 2, 3))
    for seed in range(3):
        begun = {layer for run in runs[3 * seed : 3 * seed + 3] for layer in run.begun[1:]}
        assert begun == set(range(1, spec.n_layers + 1)), "a drift of every layer, and none, must occur"
    assert any(run.nfe < G for run in runs) and any(len(run.tracked[0]) == 1 for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (SPEC, dict(sim_axis="heads", gamma=0.7)),
        (DEEP, dict(tracked=3, sliding_window=8, gamma=0.7)),
        (SPEC, dict(sliding_window=G, threshold=1.5)),
        (DEEP, dict(schedule="blocks", block_length=8, sliding_window=6)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_equals_a_plain_loop_with_other_settings(spec, settings):
    runs = check(spec, (1, 2), **settings)
    assert any(0 < run.refreshes < run.nfe - 1 for run in runs)
    if settings.get("threshold", 0) > 1:
        assert {run.nfe for run in runs} == {G}


@pytest.mark.slow
def test_above_one_every_pass_refreshes_above_the_first_layer_and_below_zero_none_does():
    for gamma, first in ((1.5, 1), (-1.0, DEEP.n_layers)):
        runs = check(DEEP, (1,), gamma=gamma)
        assert {layer for run in runs for layer in run.begun[1:]} == {first}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anew(cache.ElasticCache):
    """Every row of every layer in every pass."""

    def wants(self, spec, state):
        return jnp.zeros_like(state.nfe)


@pytest.mark.slow
def test_p06_full_width_from_the_first_layer_on_is_decoding_without_a_cache():
    model = model_of(DEEP)
    decoder = decoders.elastic_cache(**SETTINGS | dict(sliding_window=G, threshold=0.7))
    plain_ = decoded(model, decoders.parallel(schedule="whole", gen_length=G, threshold=0.7))
    anew = decoded(model, decoder.replace(cache=Anew(sliding_window=G)))
    for answer, want in zip(anew, plain_, strict=True):
        np.testing.assert_array_equal(answer.trace["tokens"], want.trace["tokens"])
        assert answer.stats.nfe == want.stats.nfe and answer.stats.rows == want.stats.rows


@pytest.mark.slow
def test_a_guided_batch_equals_single_runs_and_kernels_change_nothing():
    model, settings = model_of(SPEC), SETTINGS | dict(guidance=0.7)
    decoder, kernels = decoders.elastic_cache(**settings), decoders.elastic_cache(**settings, kernels="interpret")
    together, other = (engine.decode(model, d, engine.init_state(model, d, PROMPTS)) for d in (decoder, kernels))
    np.testing.assert_array_equal(other.generated, together.generated)
    for i, prompt in enumerate(PROMPTS):
        (alone,) = generate(model, None, [prompt], decoder)
        assert alone.tokens == together.generated[i].tolist() and alone.stats.nfe == together.nfe[i]
        assert alone.stats.rows == pytest.approx(float(together.rows[i]))


@pytest.mark.parametrize("axis", cache.elastic.AXES)
def test_cosines_leave_out_dead_rows_and_padding(axis):
    rng = np.random.default_rng(0)
    before, now = (rng.dirichlet(np.ones(7), size=(2, 4, 3)).astype(np.float32) for _ in range(2))
    valid = np.array([[True] * 7, [False] * 2 + [True] * 5])
    before, now = before * valid[:, None, None], now * valid[:, None, None]
    live = np.array([[True, False, True], [True] * 3])
    got = cache.ElasticCache(sim_axis=axis).alike(*map(jnp.asarray, (before, now, live, valid)))
    for i in range(2):
        pairs = [a[i][:, live[i]][:, :, valid[i]] for a in (before, now)]
        pairs = pairs if axis == "keys" else [np.moveaxis(a, 0, 2) for a in pairs]
        cosines = [
            x @ y / np.linalg.norm(x) / np.linalg.norm(y)
            for x, y in zip(*(a.reshape(-1, a.shape[2]) for a in pairs), strict=True)
        ]
        assert got[i] == pytest.approx(np.mean(cosines), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sim_axis="rows"), r"sim_axis='rows' is not accepted: keys \| heads"),
        (dict(sliding_window=0), "sliding_window=0 is not accepted"),
        (dict(tracked=0), "tracked=0 is not accepted"),
        (dict(commit="polestar"), "goes by token drift, and cache ElasticCache gives none"),
        (dict(commit="dawn"), "goes by the attention of every row, and cache ElasticCache gives none"),
        (
            dict(commit="prophet"),
            "goes by the scores of every generated position in every pass, and cache ElasticCache",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        decoders.elastic_cache(**settings)


def test_the_span_is_the_generation_whatever_the_block_length():
    decoder = decoders.elastic_cache(gen_length=48, block_length=8)
    assert decoder.schedule.capacity == 48 and dict(decoder.chosen)["block_length"] == 48
    assert decoders.elastic_cache(gen_length=48, block_length=8, schedule="blocks").schedule.capacity == 8
    assert decoders.elastic_cache(gen_length=48, commit="quota").commit.steps_per_block == 48
    with pytest.raises(InputError, match="sim_axis 'rows' is not accepted"):
        cache.ElasticCache(sim_axis="rows")
