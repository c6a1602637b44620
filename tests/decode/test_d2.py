"""d2Cache against a plain loop of its description with lists of rows, and the properties it promises."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Distribution
from polestar_jax import cache, commit, decoders
from polestar_jax.cache.d2 import _Rollout
from polestar_jax.commit.certainty import density
from polestar_jax.decode import engine
from polestar_jax.decode.policy import Needs, Wanted
from polestar_jax.decode.rows import picked
from polestar_jax.decode.state import FALLBACK, Scores
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.generation import generate
from tests.fakes import DREAM, MASK, SPEC, TableModel, lively_model, table_for
from tests.oracles import cached
from tests.oracles.numpy_model import rms_norm, rotate

PROMPTS = [[3, 1, 4, 1, 5], [2], list(range(1, 20))]
SPECS = pytest.mark.parametrize("spec", [SPEC, DREAM], ids=["llada", "dream"])
G = 16
SETTINGS = dict(gen_length=G, candidates=4, influential=0.15, density_sigma=3.0, certainty_sigma=3.0)


@functools.cache
def model_of(spec, seed=1):
    return lively_model(spec, seed)


def plain_density(decided, sigma):
    """The smoothed indicator at each position, term by term; far enough out nothing is left of a term."""
    g = len(decided)

    def known(j):
        return True if j < 0 else decided[min(j, g - 1)]

    reach = range(-math.ceil(12 * sigma), g + math.ceil(12 * sigma))
    terms = [[math.exp(-((i - j) ** 2) / (2 * sigma**2)) for j in reach if known(j)] for i in range(g)]
    return [math.fsum(row) / (sigma * math.sqrt(2 * math.pi)) for row in terms]


class D2(cached.Run):
    """One sequence; the last known confidences, what the last pass's attention led to, and tokens still to be computed."""

    def __init__(self, model, prompt, settings):
        super().__init__(model, prompt, settings["gen_length"])
        self.k, self.share = settings["candidates"], settings["influential"]
        self.sigma, self.gaps = settings["density_sigma"], settings.get("inflation", 0)
        self.block, self.update = settings.get("block_length", self.g), settings.get("conf_update", True)
        self.limit = settings.get("row_capacity", 10**6)
        self.confidence, self.waiting, self.dropped = {}, [], 0

    def forward(self, rows):
        """Compute these rows; what they say about undecided positions, and the rollout over all columns."""
        ref, at, n = self.ref, np.array(rows), len(self.tokens)
        x, rollout = ref.embedding[self.tokens[at]], np.eye(n)
        group = ref.n_heads // ref.n_kv_heads
        for i, w in enumerate(ref.layers):
            normed = rms_norm(x, w["attn_norm"], ref.eps)
            q, k, v = (normed @ w[name].T + w.get(f"{name}_bias", 0) for name in "qkv")
            q = rotate(q.reshape(len(at), ref.n_heads, -1), at, ref.theta)
            self.keys[i][at] = rotate(k.reshape(len(at), ref.n_kv_heads, -1), at, ref.theta)
            self.values[i][at] = v.reshape(len(at), ref.n_kv_heads, -1)
            weights, heads = [], []
            for j in range(ref.n_heads):
                scores = q[:, j] @ self.keys[i][:, j // group].T / np.sqrt(self.spec.head_dim)
                scores = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights.append(scores / scores.sum(axis=1, keepdims=True))
                heads.append(weights[-1] @ self.values[i][:, j // group])
            attention = np.eye(n)
            attention[at] = np.mean(weights, axis=0)
            attention += np.eye(n)
            rollout = attention / attention.sum(axis=1, keepdims=True) @ rollout
            x = x + np.stack(heads, axis=1).reshape(len(at), -1) @ w["out"].T
            normed = rms_norm(x, w["mlp_norm"], ref.eps)
            gate = normed @ w["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T
        logits = rms_norm(x, ref.norm, ref.eps) @ ref.head.T
        logits[:, self.spec.mask_id] = -np.inf
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        self.rows += len(rows)
        self.full += len(rows) == n
        self.influence = rollout.sum(axis=0)
        assert np.allclose(rollout.sum(axis=1), 1)
        guesses = {}
        for row, scores in zip(rows, p, strict=True):
            position = row - self.p + self.shift
            if 0 <= position < self.g and self.committed_at[position] < 0:
                guesses[position] = cached.Guess(int(scores.argmax()), float(scores.max()), 0.0)
        return guesses

    def next_rows(self):
        decided = [at >= 0 for at in self.committed_at]
        around = plain_density(decided, self.sigma)
        start = self.undecided[0] // self.block * self.block
        score = {i: self.confidence[i] * around[i] for i in self.undecided}
        best = max(score.values())
        for i in score:
            score[i] += best if start <= i < start + self.block else 0
        end = start
        while end < self.g and sum(start <= i < end for i in score) < self.k:
            end += self.block
        near = [i for i in score if start <= i < end]
        promising = sorted(near, key=lambda i: (-score[i], i))[: self.k]
        fixed = [self.p + i - self.shift for i in promising]
        waiting = [self.p + i for i in sorted(self.waiting)]
        free = [j for j in range(len(self.tokens)) if j not in fixed and j not in waiting]
        free.sort(key=lambda j: (-self.influence[j], j))
        total, gathered, influential = sum(self.influence[j] for j in free), 0.0, []
        for j in free:
            gathered += self.influence[j] / total
            if gathered > self.share and influential:
                break
            influential.append(j)
        order = list(dict.fromkeys([fixed[0], *waiting, *fixed, *influential]))
        inside = sorted(order)
        for left, right in itertools.pairwise(inside):
            if right - left - 1 <= self.gaps:
                order += range(left + 1, right)
        self.dropped += max(0, len(order) - self.limit)
        return sorted(order[: self.limit])

    def advance(self):
        rows = list(range(len(self.tokens))) if self.nfe == 0 else self.next_rows()
        guesses = self.forward(rows)
        if self.update or self.nfe == 0:
            self.confidence |= {i: guess.confidence for i, guess in guesses.items()}
        self.waiting = [i for i in self.waiting if self.p + i not in rows]
        return guesses


def plain(model, prompt, settings):
    run = D2(model, prompt, settings)
    while run.undecided:
        guesses = run.advance()
        around = plain_density([at >= 0 for at in run.committed_at], settings["certainty_sigma"])
        end = (run.undecided[0] // run.block + 1) * run.block
        inside = sorted((i for i in guesses if i < end), key=lambda i: (-guesses[i].confidence * around[i], i))
        chosen = [i for i in inside if guesses[i].confidence * around[i] >= settings.get("threshold", 10)] or inside[:1]
        run.commit(chosen, guesses)
        run.waiting += chosen
    return run


def decoded(model, decoder):
    """All prompts together, in float32, and what was committed pass by pass."""
    decoder = decoder.replace(trace=Trace("tokens"))
    state = engine.decode(model, decoder, engine.init_state(model, decoder, PROMPTS))
    return state, [np.asarray(state.trace["tokens"])[:nfe, i] for i, nfe in enumerate(state.nfe.tolist())]


def check(spec, seeds, **settings):
    """All prompts together equal their plain loops pass for pass; the loops."""
    settings = SETTINGS | settings
    runs = []
    for seed in seeds:
        model = model_of(spec, seed)
        state, histories = decoded(model, decoders.d2_cache(**settings))
        assert state.full_forwards.tolist() == [1] * len(PROMPTS)
        for i, prompt in enumerate(PROMPTS):
            run = plain(model, prompt, settings)
            np.testing.assert_array_equal(histories[i], run.history)
            assert (state.nfe[i], state.rows[i], state.cache.dropped[i]) == (run.nfe, run.rows, run.dropped)
            np.testing.assert_allclose(state.cache.influence[i, state.pad[i] :], run.influence, atol=1e-4)
            confidence = [run.confidence[j] for j in range(G)]
            np.testing.assert_allclose(state.cache.confidence[i], confidence, atol=1e-4)
            runs.append(run)
    return runs


@pytest.mark.parametrize("spec", [pytest.param(SPEC, marks=pytest.mark.slow), DREAM], ids=["llada", "dream"])
def test_equals_a_plain_loop(spec):
    runs = check(spec, (1, 2, 3), threshold=0.15)
    assert any(run.nfe < G - 1 for run in runs) and len({run.nfe for run in runs}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (SPEC, dict()),
        (DREAM, dict(schedule="blocks", block_length=4, candidates=6)),
        (SPEC, dict(inflation=2, influential=0.0)),
        (DREAM, dict(conf_update=False, threshold=0.3)),
        (SPEC, dict(row_capacity=4, threshold=0.1)),
    ],
    ids=lambda value: ",".join(value) or "defaults" if isinstance(value, dict) else None,
)
def test_equals_a_plain_loop_with_other_settings(spec, settings):
    runs = check(spec, (1, 2), **settings)
    assert any(run.dropped for run in runs) == ("row_capacity" in settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anew(cache.D2Cache):
    """Every row in every pass."""

    def wants(self, spec, state):
        return jnp.zeros_like(state.nfe)


@pytest.mark.slow
def test_p06_computing_every_row_is_the_rule_without_a_cache():
    """Also where the rows are chosen, all of them, by each of the three reasons to choose one."""
    model, decoder = model_of(DREAM), decoders.d2_cache(**SETTINGS, threshold=0.15)
    want = decoded(model, decoder.replace(cache=cache.NoCache()))
    for policy in (Anew(), cache.D2Cache(candidates=G, influential=1.0)):
        state, histories = decoded(model, decoder.replace(cache=policy))
        jax.tree.map(np.testing.assert_array_equal, histories, want[1])
        np.testing.assert_array_equal(state.rows, want[0].rows)


@pytest.mark.slow
def test_a_guided_batch_equals_single_runs_and_twice_the_room_or_kernels_change_nothing():
    model, settings = model_of(SPEC), SETTINGS | dict(guidance=0.7, threshold=0.15)
    decoder = decoders.d2_cache(**settings)
    together = engine.decode(model, decoder, engine.init_state(model, decoder, PROMPTS))
    assert not together.cache.dropped.any()
    for i, prompt in enumerate(PROMPTS):
        (alone,) = generate(model, None, [prompt], decoder)
        assert alone.tokens == together.generated[i].tolist()
        assert (alone.stats.nfe, alone.stats.rows) == (together.nfe[i], together.rows[i])
    for change in (dict(row_capacity=2 * decoder.cache.capacity(32 + G)), dict(kernels="interpret")):
        other = decoders.d2_cache(**settings | change)
        other = engine.decode(model, other, engine.init_state(model, other, PROMPTS))
        np.testing.assert_array_equal(other.generated, together.generated)


@pytest.mark.parametrize("sigma", [0.5, 3.0, 10.0, 500.0])
def test_density_equals_its_definition(sigma):
    rng = np.random.default_rng(1)
    decided = rng.random((4, 20)) < 0.4
    decided[0], decided[1, -1], decided[2, -1] = True, True, False
    got = density(jnp.asarray(decided), sigma)
    np.testing.assert_allclose(got, [plain_density(row.tolist(), sigma) for row in decided], rtol=1e-5)
    assert got[0] == pytest.approx(1.0, abs=0.02), "all decided"
    if sigma == 500.0:
        assert np.ptp(np.asarray(got[2])) < 0.02, "the same everywhere when it is wide"


def test_the_rollout_of_the_computed_rows_is_that_of_all():
    rng = np.random.default_rng(2)
    n, valid = 9, np.array([[True] * 9, [False] * 3 + [True] * 6])
    chosen = np.array([[1, 0, 0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 1, 0, 0, 1]], bool)
    rows = picked(jnp.asarray(chosen), 5)
    there = rows.put(jnp.zeros((2, n), bool), rows.live)
    ours = _Rollout(rows, there, jax.nn.one_hot(rows.columns, n))
    want = [np.eye(n)] * 2
    for _ in range(3):
        scores = np.where(valid[:, None, None], rng.normal(size=(2, 4, 5, n)) * 2, -1e30)
        lse = np.log(np.exp(scores).sum(axis=-1))
        ours = ours.through(Distribution(jnp.asarray(scores, jnp.float32), jnp.asarray(lse, jnp.float32)))
        for i in range(2):
            attention, live = np.eye(n), np.asarray(rows.live[i])
            attention[np.asarray(rows.columns[i])[live]] = np.exp(scores - lse[..., None])[i].mean(axis=0)[live]
            want[i] = (attention + np.eye(n)) / 2 @ want[i]
    got = ours.total(jnp.asarray(valid))
    for i in range(2):
        np.testing.assert_allclose(got[i], want[i][valid[i]].sum(axis=0), atol=1e-5)
    np.testing.assert_allclose(got.sum(axis=1), valid.sum(axis=1), rtol=1e-5)


@SPECS
def test_the_first_pass_is_influenced_by_no_padding(spec):
    """Whatever the padding columns hold, influence and confidence are those of each prompt alone."""
    model, decoder = model_of(spec), decoders.d2_cache(**SETTINGS)
    state = engine.init_state(model, decoder, PROMPTS)
    noise = np.random.default_rng(5).integers(0, 27, state.tokens.shape)
    state = state.replace(tokens=jnp.where(state.positions < 0, jnp.asarray(noise, jnp.int32), state.tokens))
    result = jax.jit(lambda state: decoder.cache.forward(model, decoder.wanted, state, "entry"))(state)
    for i, prompt in enumerate(PROMPTS):
        run = D2(model, prompt, SETTINGS)
        run.forward(list(range(len(run.tokens))))
        want = np.concatenate([np.zeros(int(state.pad[i])), run.influence])
        np.testing.assert_allclose(result.cache.influence[i], want, atol=1e-4)
        assert result.computed[i] == len(run.tokens)


def begun(spec, guided=False, **settings):
    """The policy, and a state of two sequences in their second pass in which a few tokens have been decided."""
    decoder = decoders.d2_cache(**SETTINGS | settings)
    state = engine.init_state(lively_model(spec), decoder, PROMPTS[::2])
    rng = np.random.default_rng(3)
    done = jnp.asarray(rng.random((1 if guided else 2, G)) < 0.3).repeat(2 if guided else 1, axis=0)
    tokens = state.tokens.at[:, state.prompt_columns :].set(jnp.where(done, 5, spec.mask_id))
    own = state.cache._replace(
        confidence=jnp.asarray(rng.random(done.shape[1:]), jnp.float32)[None].repeat(2, axis=0),
        influence=jnp.asarray(rng.random(tokens.shape), jnp.float32),
        waiting=done & (jnp.arange(G) % 2 == 0),
    )
    return decoder.cache, state.replace(tokens=tokens, cache=own, nfe=state.nfe + 1)


def test_the_least_of_the_influential_is_one_and_gaps_are_filled():
    spec, wanted = DREAM, Wanted(G, Needs())
    for share, gaps in ((0.0, 0), (0.0, 3), (0.3, 0)):
        policy, state = begun(spec, influential=share, inflation=gaps)
        rows, dropped = policy.chosen(wanted, state, spec)
        place = policy.promising(wanted, state, state.generated == spec.mask_id)
        for i in range(2):
            got = set(np.asarray(rows.columns[i])[np.asarray(rows.live[i])].tolist())
            scored = np.flatnonzero(np.asarray(place[i]) < 4) + state.prompt_columns - spec.logit_shift
            fixed = {*scored.tolist(), *(np.flatnonzero(state.cache.waiting[i]) + state.prompt_columns).tolist()}
            extra = got - fixed
            assert fixed < got and dropped[i] == 0 and min(got) >= state.pad[i]
            if gaps:
                inside = sorted(got)
                assert all(right - left == 1 or right - left > 4 for left, right in itertools.pairwise(inside))
                assert len(extra) > 1
            elif not share:
                free = [j for j in range(int(state.pad[i]), state.tokens.shape[1]) if j not in fixed]
                assert extra == {max(free, key=lambda j: float(state.cache.influence[i, j]))}
            else:
                assert len(extra) > 1


def test_without_room_the_best_undecided_position_comes_first_and_new_tokens_next():
    policy, state = begun(SPEC, row_capacity=3)
    rows, dropped = policy.chosen(Wanted(G, Needs()), state, SPEC)
    place = policy.promising(Wanted(G, Needs()), state, state.generated == MASK)
    for i in range(2):
        new = np.flatnonzero(state.cache.waiting[i])[:2] + state.prompt_columns
        best = int(np.argmin(place[i])) + state.prompt_columns
        assert len(new) == 2 and rows.columns[i].tolist() == [best, *new.tolist()] and dropped[i] > 0


def test_under_guidance_both_halves_compute_the_same_rows():
    policy, state = begun(SPEC, guided=True, influential=0.4)
    state = state.replace(pad=state.pad[:1].repeat(2))
    apart, _ = policy.chosen(Wanted(G, Needs()), state, SPEC)
    assert apart.columns[0].tolist() != apart.columns[1].tolist()
    rows, _ = policy.chosen(decoders.d2_cache(guidance=1.0).wanted, state, SPEC)
    np.testing.assert_array_equal(rows.columns[0], rows.columns[1])
    np.testing.assert_array_equal(rows.live[0], rows.live[1])


def test_positions_to_be_committed_last_are_so_however_near():
    _, state = begun(SPEC)
    state = state.replace(reason=jnp.full((2, G), -1, jnp.int8).at[:, :3].set(0))
    confidence = jnp.full((2, G), 0.5).at[:, 3].set(-jnp.inf)
    open_ = jnp.arange(G)[None].repeat(2, axis=0) >= 3
    scores = Scores(*[confidence] * 4, open_, jnp.zeros_like(open_), open_, jnp.ones(2, bool))
    for rule in (commit.threshold(0.9), commit.Quota(steps_per_block=G)):
        accept, _, _ = commit.Certainty(rule, certainty_sigma=0.5).select(scores, state)
        assert np.argwhere(accept).tolist() == [[0, 4], [1, 4]], "of equal ones the nearest, but for the last"
    scores = scores._replace(confidence=confidence.at[:, 3].set(0.2))
    accept, reason, _ = commit.Certainty(commit.threshold(0.1), certainty_sigma=0.5).select(scores, state)
    assert np.argwhere(accept).tolist() == [[0, 3], [1, 3]] and reason[0, 3] == FALLBACK, "the nearest, though below"


def test_equal_confidences_are_committed_from_left_to_right_and_a_wide_density_does_nothing():
    level = TableModel(table_for([5, 6] * 8, [0.4] * 16))
    decoder = decoders.d2_cache(gen_length=16, cache="none")
    state = engine.decode(level, decoder, engine.init_state(level, decoder, [[1, 2, 3, 4]]))
    assert state.committed_at[0].tolist() == list(range(16))
    rng = np.random.default_rng(4)
    uneven = TableModel(table_for([5, 6] * 8, rng.permutation(np.linspace(0.2, 0.9, 16)).tolist()))
    wide = decoders.d2_cache(gen_length=16, cache="none", certainty_sigma=1e4)
    plain_ = decoders.vanilla(gen_length=16, block_length=16)
    orders = [
        engine.decode(uneven, d, engine.init_state(uneven, d, [[1, 2, 3, 4]])).committed_at for d in (wide, plain_)
    ]
    np.testing.assert_array_equal(*orders)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(density_sigma=0.4), "density_sigma=0.4 is not accepted: a number >= 0.5"),
        (dict(certainty_sigma=0.4), "certainty_sigma=0.4 is not accepted: a number >= 0.5"),
        (dict(candidates=0), "candidates=0 is not accepted"),
        (dict(influential=1.1), "influential=1.1 is not accepted"),
        (dict(row_capacity=1), "row_capacity=1 is not accepted"),
        (dict(threshold=0.5, steps=8), "setting steps=8 goes with threshold=none alone"),
        (dict(commit="polestar"), "goes by token drift, and cache D2Cache gives none"),
        (dict(commit="dawn"), "goes by the attention of every row, and cache D2Cache gives none"),
        (dict(commit="prophet"), "goes by the scores of every generated position in every pass, and cache D2Cache"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        decoders.d2_cache(**settings)


def test_too_narrow_a_density_is_refused_where_it_is_made():
    for make in (lambda: cache.D2Cache(density_sigma=0.1), lambda: commit.Certainty(commit.threshold(0.9), 0.1)):
        with pytest.raises(InputError, match=r"sigma 0\.1 is not accepted: a number >= 0\.5 and <= 10000"):
            make()
