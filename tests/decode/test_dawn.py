"""DAWN: its rule against plain Python on random graphs, and decoding against the attention of a NumPy transformer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import commit, decoders
from polestar_jax.decode import engine
from polestar_jax.errors import InputError
from tests.fakes import DREAM, MASK, SPEC, TableModel, lively_model
from tests.oracles import numpy_model
from tests.oracles.tables import View, passes, scores_of

G, B = 16, 8
PROMPTS = [[1, 2, 3, 4], [5, 6], list(range(1, 12))]
SETTINGS = dict(low_threshold=0.5, sink_threshold=0.15, edge_threshold=0.1, induced_threshold=0.58)


def dawn(attention, canvas, confidence, eligible, prompt, end, settings, adjacency="both"):
    """The sets C1, C2 and C3 of the rule, positions of the generation behind ``prompt``; the first two arguments are of the
    canvas without padding, [n, n] by (row, column) and [n]."""
    sinks = {k for k in range(len(attention)) if np.mean(attention[:, k]) > settings["sink_threshold"]}

    def depends(q, k):
        return q != k and k not in sinks and attention[q, k] >= settings["edge_threshold"]

    anchors = [j for j in range(prompt + end) if j - prompt not in eligible and canvas[j] >= 0.9]
    c1 = {i for i in eligible if confidence[i] >= 0.9}
    c2 = {i for i in eligible if any(depends(prompt + i, j) for j in anchors)}
    c2 = {i for i in c2 if confidence[i] >= settings["induced_threshold"]}
    first = c1 & c2 if adjacency == "both" else c1 | c2
    left = [i for i in eligible if i not in c1 | c2 and confidence[i] >= settings["low_threshold"]]
    left = [i for i in left if not any(depends(prompt + i, prompt + j) for j in first)]
    c3 = []
    for i in sorted(left, key=lambda i: (-confidence[i], i)):
        if not any(depends(prompt + i, prompt + j) or depends(prompt + j, prompt + i) for j in c3):
            c3.append(i)
    return c1, c2, set(c3), len(left)


class Graphs:
    """Random passes of many sequences with unequal prompts, in the second block; what lies in the padding is nonsense."""

    def __init__(self, count=80, seed=0):
        rng = self.rng = np.random.default_rng(seed)
        decoder = decoders.dawn(gen_length=G, block_length=B)
        self.prompts = rng.integers(1, 9, count).tolist()
        state = engine.init_state(TableModel(np.zeros((64, 30))), decoder, [[1] * p for p in self.prompts], columns=8)
        b, n = state.tokens.shape
        real = np.asarray(state.positions) >= 0
        sinks = rng.choice([1, 6], p=[0.9, 0.1], size=(b, 1, n))
        weights = rng.exponential(size=(b, n, n)) ** 3 * sinks * real[:, None]
        self.attention = np.float32(weights / weights.sum(axis=2, keepdims=True))
        self.attention = np.where(real[:, :, None] & real[:, None], self.attention, 7.0).astype(np.float32)
        self.canvas = np.float32(np.where(real, rng.choice([0.5, 0.95], size=(b, n)), 0.0))
        levels = rng.choice([0.1, 0.42, 0.55, 0.6, 0.7, 0.95], size=(b, G))
        self.confidence = np.float32(levels + 0.01 * rng.random((b, G)))
        self.eligible = rng.random((b, G)) < 0.7
        self.eligible[:, :B] = False
        self.state = state.replace(span_start=jnp.full(b, B), span_end=jnp.full(b, G))

    def accepted(self, **settings):
        rule = commit.Dawn(block_length=B, **SETTINGS | settings)
        more = dict(attention=jnp.asarray(self.attention), canvas=jnp.asarray(self.canvas))
        scores = scores_of(self.confidence, self.eligible, **more)
        return np.asarray(jax.jit(rule.accept)(scores, self.state))

    def sets(self, **settings):
        settings = SETTINGS | settings
        adjacency = settings.pop("adjacency", "both")
        for i, prompt in enumerate(self.prompts):
            pad = 8 - prompt
            parts = self.attention[i, pad:, pad:], self.canvas[i, pad:], self.confidence[i]
            yield dawn(*parts, np.flatnonzero(self.eligible[i]).tolist(), prompt, G, settings, adjacency)


@pytest.fixture(scope="module")
def graphs():
    return Graphs()


def test_the_rule_equals_plain_python_on_random_graphs(graphs):
    accepted = {}
    for adjacency in ("both", "either"):
        accepted[adjacency] = graphs.accepted(adjacency=adjacency)
        sets = list(graphs.sets(adjacency=adjacency))
        for got, (c1, c2, c3, _) in zip(accepted[adjacency], sets, strict=True):
            assert set(np.flatnonzero(got)) == c1 | c2 | c3
        assert sum(bool(c2 - c1) for _, c2, _, _ in sets) > 10 and sum(len(c3) > 1 for *_, c3, _ in sets) > 5
        assert sum(len(c3) < left for *_, c3, left in sets) > 10, "conflicts must occur"
    assert (accepted["both"] != accepted["either"]).any()


def test_without_edges_it_is_the_threshold_rule(graphs):
    sure = graphs.eligible & (graphs.confidence >= 0.5)
    np.testing.assert_array_equal(graphs.accepted(edge_threshold=1.5), np.where(graphs.eligible, sure, False))
    only = graphs.eligible & (graphs.confidence >= 0.9)
    np.testing.assert_array_equal(graphs.accepted(low_threshold=1.5, induced_threshold=1.5), only)


def maps(reference, tokens):
    """What each row attends to, mean over the heads of the last four layers, [n, n]; and the last layer's output."""
    states = numpy_model.hidden_states(reference, tokens)
    positions, found = np.arange(len(tokens)), []
    for layer, x in list(zip(reference.layers, states[:-1], strict=True))[-4:]:
        normed = numpy_model.rms_norm(x, layer["attn_norm"], reference.eps)
        q, k = (normed @ layer[name].T + layer.get(f"{name}_bias", 0) for name in "qk")
        q = numpy_model.rotate(q.reshape(len(x), reference.n_heads, -1), positions, reference.theta)
        k = numpy_model.rotate(k.reshape(len(x), reference.n_kv_heads, -1), positions, reference.theta)
        for head in range(reference.n_heads):
            scores = q[:, head] @ k[:, head * reference.n_kv_heads // reference.n_heads].T / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            found.append(weights / weights.sum(axis=1, keepdims=True))
    return np.mean(found, axis=0), states[-1]


def decoded(model, prompt, settings):
    """[(tokens, committed)] pass by pass, and how many passes had something of C2 alone, and of C3."""
    reference, shift, p = numpy_model.of_denoiser(model), model.spec.logit_shift, len(prompt)
    tokens, run, seen = [MASK] * G, [], np.zeros(2, int)
    for start in range(0, G, B):
        while MASK in tokens[start : start + B]:
            attention, x = maps(reference, np.array([*prompt, *tokens]))
            logits = numpy_model.rms_norm(x, reference.norm, reference.eps) @ reference.head.T
            logits[:, MASK] = -np.inf
            if shift:  # the row at i scores i + 1; nothing scores the first position
                logits = np.concatenate([np.zeros_like(logits[:1]), logits[:-1]])
            whole = View(logits, list(tokens), start, start + B, 0, 0)
            view = View(logits[p:], list(tokens), start, start + B, 0, 0)
            canvas = np.where(np.arange(len(x)) >= shift, whole.confidence, 0)
            c1, c2, c3, _ = dawn(attention, canvas, view.confidence, view.eligible, p, start + B, settings)
            seen += bool(c2 - c1), bool(c3)
            chosen = sorted(c1 | c2 | c3) or [view.best(view.eligible)]
            for i in chosen:
                tokens[i] = int(view.token[i])
            run.append((list(tokens), chosen))
    return run, seen


@pytest.mark.parametrize("family", [pytest.param("llada", marks=pytest.mark.slow), "dream"])
def test_decodes_as_the_oracle_in_a_batch_of_unequal_prompts(family):
    """LLaDA's model has five layers here, of which the last four count; every prompt equals its own single run."""
    spec = dataclasses.replace(SPEC, n_layers=5) if family == "llada" else DREAM
    settings = SETTINGS | dict(sink_threshold=0.2, edge_threshold=0.06, low_threshold=0.3, induced_threshold=0.25)
    decoder, seen = decoders.dawn(gen_length=G, block_length=B, **settings), 0
    for seed in (0, 1):
        model = lively_model(spec, seed)
        for prompt, run in zip(PROMPTS, passes(model, decoder, PROMPTS), strict=True):
            want, found = decoded(model, prompt, settings)
            assert run == want
            seen = seen + found
    assert (seen > 2).all(), seen


def test_each_family_has_its_defaults():
    names = ("low_threshold", "sink_threshold", "edge_threshold", "induced_threshold", "adjacency")
    for spec, values in ((SPEC, (0.75, 0.01, 0.07, 0.7, "both")), (DREAM, (0.8, 0.03, 0.1, 0.75, "both"))):
        rule = decoders.dawn(gen_length=G).for_model(spec).commit
        assert tuple(getattr(rule, name) for name in names) == values


def test_what_does_not_go_together_is_refused():
    with pytest.raises(
        InputError, match="commit Dawn goes by the attention of every row, and cache DualCache gives none"
    ):
        decoders.dawn(cache="dual")
    with pytest.raises(InputError, match=r"setting adjacency='all' is not accepted: both \| either"):
        decoders.dawn(adjacency="all")
    with pytest.raises(InputError, match="adjacency 'all' is not accepted"):
        commit.Dawn(block_length=8, adjacency="all")
    with pytest.raises(InputError, match="gives spans of up to 32 positions, and commit Dawn holds blocks of 8"):
        decoders.parallel(gen_length=64).replace(commit=commit.Dawn(block_length=8))
