"""Commit rules, sampling and end-of-text handling, mostly on tables of dictated logits."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl

from polestar_jax import commit, decoders
from polestar_jax.decode import engine
from polestar_jax.decode.sampling import Sampling, score_rows
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError, RunError
from polestar_jax.generation import generate
from tests.fakes import EOS, EOT, MASK, SPEC, TableModel, table_for

PROMPT = [1, 2, 3, 4]


def answer(table, decoder, spec=SPEC, prompt=PROMPT):
    (result,) = generate(TableModel(table, spec), None, [prompt], decoder.replace(trace=Trace()))
    return result


def commits_a_pass(result) -> list[int]:
    return result.trace["committed"].sum(axis=1).tolist()


def test_b01_uniform_logits_do_not_hang():
    """B01: nothing reaches the threshold, so every pass commits the single most confident position, lowest first."""
    result = answer(np.zeros((36, 30), np.float32), decoders.parallel(gen_length=32, block_length=8))
    assert result.stats.nfe == 32 and result.stats.commits["fallback"] == 32
    assert result.trace["step"].tolist() == list(range(32))


def test_b01_finished_row_is_never_forced():
    """B01: in a batch, a complete row gets no commit and no pass more, while the other goes on."""
    decoder = decoders.parallel(gen_length=8, block_length=8)
    model = TableModel(table_for([5] * 8, [0.2] * 8))
    state = engine.init_state(model, decoder, [PROMPT, PROMPT])
    full = jnp.full((8,), 7, jnp.int32)
    state = state.replace(tokens=state.tokens.at[0, state.prompt_columns :].set(full), done=jnp.array([True, False]))
    state = engine.decode(model, decoder, state)
    assert state.nfe.tolist() == [0, 8]
    assert state.generated[0].tolist() == [7] * 8 and (np.asarray(state.committed_at[0]) == -1).all()


def test_b18_no_quota_is_forced_below_the_threshold():
    """B18: confidences .95 .2 .1 .05: only the first is sure; then one a pass by fallback, never a quota."""
    result = answer(table_for([5, 6, 7, 8], [0.95, 0.2, 0.1, 0.05]), decoders.parallel(gen_length=4))
    assert commits_a_pass(result) == [1, 1, 1, 1]
    assert result.trace["reason"].tolist() == [0, 1, 1, 1]


def test_threshold_is_inclusive_and_commits_in_parallel():
    result = answer(table_for([5, 6, 7, 8], [0.5, 0.75, 0.95, 0.99]), decoders.parallel(gen_length=4, threshold=0.7))
    assert commits_a_pass(result) == [3, 1]
    logits = np.zeros((8, 30), np.float32)
    exact = answer(logits, decoders.parallel(gen_length=4, threshold=1 / 29))  # 29 equal ids beside the barred mask
    assert commits_a_pass(exact) == [4]


def test_b67_quota_gives_the_remainder_to_the_first_passes():
    """B67: 10 masks in 4 steps are 3, 3, 2, 2."""
    result = answer(np.zeros((14, 30), np.float32), decoders.vanilla(gen_length=10, block_length=10, steps=4))
    assert commits_a_pass(result) == [3, 3, 2, 2]
    assert result.stats.nfe == 4 and result.trace["step"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]


def test_b69_dream_schedule():
    """B69: times go from 1 to eps, a pass takes floor(left (1 - s / t)), the last one all that is left."""
    left, expected = 8, []
    t = [1 + (1e-3 - 1) * i / 4 for i in range(5)]
    for i in range(4):
        take = left if i == 3 else math.floor(left * (1 - t[i + 1] / t[i]))
        expected.append(take)
        left -= take
    assert expected == [1, 2, 2, 3], "worked by hand"
    decoder = decoders.vanilla(gen_length=8, block_length=8, steps=4, quota="dream_floor", order="maskgit_plus")
    result = answer(np.zeros((12, 30), np.float32), decoder)
    assert commits_a_pass(result) == expected


def test_dream_floor_first_pass_commits_nothing_with_one_step_a_token():
    decoder = decoders.vanilla(gen_length=16, block_length=16, quota="dream_floor", order="entropy")
    result = answer(np.zeros((20, 30), np.float32), decoder)
    assert commits_a_pass(result) == [0] + [1] * 14 + [2] and result.stats.nfe == 16


def test_orders_rank_by_what_they_say():
    """Position 0 is likeliest, 1 has the widest margin, 2 the lowest entropy (worked out in float64 here)."""
    probabilities = np.zeros((3, 30))
    probabilities[0, [3, 4]], probabilities[0, 5:25] = [0.6, 0.35], 0.05 / 20
    probabilities[1, 3], probabilities[1, 5:25] = 0.55, 0.45 / 20
    probabilities[2, [3, 4]] = [0.53, 0.47]
    best = np.sort(probabilities, axis=1)[:, ::-1]
    scores = {
        "low_confidence": best[:, 0],
        "topk_margin": best[:, 0] - best[:, 1],
        "entropy": (probabilities * np.log(np.maximum(probabilities, 1e-30))).sum(axis=1),
    }
    table = np.concatenate([np.zeros((4, 30)), np.log(np.maximum(probabilities, 1e-30))]).astype(np.float32)
    table[:, MASK] = -1e9
    firsts = {}
    for order, score in scores.items():
        result = answer(table, decoders.vanilla(gen_length=3, block_length=3, order=order))
        np.testing.assert_array_equal(
            np.argsort(result.trace["step"]), np.argsort(-score, kind="stable"), err_msg=order
        )
        firsts[order] = int(np.argmax(score))
    assert len(set(firsts.values())) == 3, "the orders must differ for the test to mean anything"


def test_b02_eos_last_holds_at_every_temperature():
    """B02: a proposed end of text or end of turn is committed after everything else; logits are not touched."""
    tokens = [EOS, 5, EOT, 6, EOS, 7, 8, EOT]
    table = table_for(tokens, [0.999, 0.5, 0.998, 0.6, 0.97, 0.7, 0.8, 0.96])
    for temperature in (0.0, 0.05):
        decoder = decoders.vanilla(gen_length=8, block_length=8, eos="last", temperature=temperature)
        result = answer(table, decoder)
        assert result.tokens == tokens
        order = np.argsort(result.trace["step"])
        assert set(order[:4]) == {1, 3, 5, 6} and set(order[4:]) == {0, 2, 4, 7}
    free = answer(table, decoders.vanilla(gen_length=8, block_length=8))
    assert int(np.argmin(free.trace["step"])) == 0


def test_b02_block_full_of_eos_still_finishes():
    for decoder in (
        decoders.vanilla(gen_length=8, block_length=4, eos="last"),
        decoders.parallel(gen_length=8, block_length=4, eos="last"),
    ):
        result = answer(table_for([EOS] * 8, [0.99] * 8), decoder)
        assert result.tokens == [EOS] * 8 and result.stats.nfe == 8


def test_eos_never_bars_the_tokens():
    table = table_for([EOS, 5, EOT, 6], [0.9] * 4)
    table[4, 9] = table[6, 9] = 1.0
    assert answer(table, decoders.parallel(gen_length=4, eos="never")).tokens == [9, 5, 9, 6]


def test_b14_the_mask_token_is_barred():
    """B14: with the mask's logit the largest everywhere, no mask token is left in the answer."""
    table = table_for([5, 6, 7, 8], [0.9] * 4)
    table[:, MASK] = 50.0
    assert answer(table, decoders.parallel(gen_length=4)).tokens == [5, 6, 7, 8]
    with pytest.raises(
        RunError, match="4 of 4 generated positions hold the mask token 29 after 4 passes: the model proposed it"
    ):
        answer(table, decoders.parallel(gen_length=4, exclude_mask=False))


@pytest.mark.parametrize("stop", [False, True])
def test_b12_early_stop_keeps_the_text(stop):
    """B12: (a) stopping early shows the full run cut at its first end of text; (b) all end of text is an empty answer."""
    tokens = [5, 6, EOS, 7, EOS, EOS, EOS, EOS, 8, 9, 10, 11]
    decoder = decoders.parallel(gen_length=12, block_length=4, stop_at_eos=stop)
    result = answer(table_for(tokens, [0.95] * 12), decoder)
    assert result.tokens == (tokens[:4] + [EOS] * 8 if stop else tokens)
    assert result.stats.nfe == (1 if stop else 3)
    empty = answer(table_for([EOS] * 12, [0.95] * 12), decoder)
    assert empty.stats.tokens_non_eos == 0 and empty.stats.tpf == 0 and empty.stats.nfe == (1 if stop else 3)


def test_b12_no_stop_before_everything_left_of_eos_is_decided():
    """B12 (c): the end of text is committed first, the rest of its block one a pass; the stop waits for the block."""
    result = answer(
        table_for([5, 6, 7, EOS, 8, 8, 8, 8], [0.3, 0.4, 0.5, 0.95] + [0.95] * 4),
        decoders.parallel(gen_length=8, block_length=4, stop_at_eos=True),
    )
    assert result.trace["step"][:4].tolist() == [3, 2, 1, 0]
    assert result.stats.nfe == 4 and result.tokens == [5, 6, 7, EOS, EOS, EOS, EOS, EOS]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(gen_length=40, block_length=32),
            "gen_length 40 is not a multiple of block_length 32; use gen_length 32 or 64",
        ),
        (dict(gen_length=7, block_length=32), "gen_length 7 is not a multiple of block_length 32"),
        (dict(gen_length=0), "setting gen_length=0 is not accepted: a whole number >= 1"),
        (
            dict(gen_length=30, block_length=10, steps=10),
            "setting steps=10 is not accepted: a multiple of the 3 blocks",
        ),
        (dict(gen_length=8, steps=16), "setting steps=16 is not accepted"),
        (dict(order="best"), "setting order='best' is not accepted: low_confidence | maskgit_plus"),
        (dict(temperature=-1.0), "setting temperature=-1.0 is not accepted: a number >= 0"),
        (dict(temperature=math.nan), "setting temperature=nan is not accepted"),
        (dict(tau=1), "method vanilla has no setting 'tau'; it has: gen_length"),
    ],
)
def test_b49_settings_are_checked(settings, message):
    with pytest.raises(InputError) as error:
        decoders.vanilla(**settings)
    assert message in str(error.value)


def test_b49_exactly_gen_length_tokens():
    result = answer(table_for([5] * 7, [0.95] * 7), decoders.parallel(gen_length=7))
    assert len(result.tokens) == 7


def test_b11_accounting():
    """B11: prompt 10, 5 real tokens, 59 end of text, 4 passes, 2 s on a fake clock: TPF 1.25, TPS 2.5."""
    from polestar_jax.generation import count

    tokens = np.array([5, 6, 7, 8, 9] + [EOS] * 58 + [EOT])
    stats = count(
        tokens, np.zeros(64, np.int8), SPEC, nfe=4, full_forwards=4, partial_forwards=0, refreshes=0, rows=96.0, near_ties=0,
        seconds=2.0, compile_seconds=9.0,
    )  # fmt: skip
    assert (stats.tokens_non_eos, stats.nfe, stats.tpf, stats.tps, stats.rows) == (5, 4, 1.25, 2.5, 96.0)
    assert (stats.tpf_all, stats.tps_all, stats.seconds, stats.compile_seconds) == (16.0, 32.0, 2.0, 9.0)


def test_b11_a_run_counts_neither_prompt_nor_filler():
    tokens = [5, 6, 7, 8, 9] + [EOS] * 59
    table = table_for(tokens, [0.95] * 64, prompt=10)
    result = answer(table, decoders.parallel(gen_length=64, block_length=16), prompt=list(range(1, 11)))
    assert (result.stats.tokens_non_eos, result.stats.nfe, result.stats.tpf) == (5, 4, 1.25)
    assert result.stats.full_forwards == 4 and result.stats.partial_forwards == 0 and len(result.tokens) == 64


def test_b66_repetition_is_reported():
    looped = answer(table_for([5, 6] * 8, [0.95] * 16), decoders.parallel(gen_length=16))
    varied = answer(table_for(list(range(5, 21)), [0.95] * 16), decoders.parallel(gen_length=16))
    assert looped.stats.repetition == pytest.approx(11 / 13) and varied.stats.repetition == 0


def test_b09_near_ties_are_reported():
    table = table_for([5, 6, 7, 8], [0.95] * 4)
    table[4, 9] = table[4, 5] - 1e-3
    assert answer(table, decoders.parallel(gen_length=4)).stats.near_ties == 0.25


def chi_square(counts, probabilities) -> float:
    """Pearson's statistic of observed counts [k] under probabilities [k]."""
    expected = np.sum(counts) * np.asarray(probabilities)
    assert len(counts) == len(expected)
    return float((((np.asarray(counts) - expected) ** 2) / expected).sum())


class TestSampling:
    """B08: Gumbel sampling in float32."""

    keys = jax.random.split(jax.random.key(0), 1)

    def scores(self, logits, key=None, **settings):
        return score_rows(
            jnp.asarray(logits, jnp.float32)[None], Sampling(**settings), SPEC, self.keys if key is None else key
        )

    def test_b08_temperature_zero_is_argmax_and_draws_nothing(self):
        logits = np.random.default_rng(0).normal(size=(6, 30))
        logits[:, MASK] = -9
        np.testing.assert_array_equal(self.scores(logits).token[0], logits.argmax(-1))
        jaxpr = jax.make_jaxpr(lambda x, k: score_rows(x, Sampling(), SPEC, k))(jnp.zeros((1, 2, 30)), self.keys)
        assert "random" not in str(jaxpr) and "threefry" not in str(jaxpr)
        drawn = jax.make_jaxpr(lambda x, k: score_rows(x, Sampling(temperature=1.0), SPEC, k))(
            jnp.zeros((1, 2, 30)), self.keys
        )
        assert "random" in str(drawn)

    def test_filters_count_at_temperature_zero_where_the_confidence_is_of_the_filtered_distribution(self):
        logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1] + [1e-9] * 26]))
        filtered = self.scores(logits, top_k=2, filtered_confidence=True, exclude_mask=False)
        np.testing.assert_allclose(filtered.confidence[0], 4 / 7, rtol=1e-6)
        nucleus = self.scores(logits, top_p=0.8, filtered_confidence=True, exclude_mask=False)
        np.testing.assert_allclose(nucleus.confidence[0], 4 / 9, rtol=1e-6)
        plain = self.scores(logits, top_k=2, exclude_mask=False)
        np.testing.assert_allclose(plain.confidence[0], 0.4, rtol=1e-6)
        assert filtered.token.item() == plain.token.item() == 0

    def test_b08_extreme_logits_stay_finite(self):
        logits = np.full((4, 30), -120.0)
        logits[:, 3] = 120.0
        scores = self.scores(logits, temperature=1.0)
        assert scores.token[0].tolist() == [3] * 4 and np.isfinite(scores.confidence).all()

    def test_b08_same_key_and_shape_same_draw(self):
        logits = np.zeros((8, 30))
        a, b = (self.scores(logits, temperature=1.0).token for _ in range(2))
        np.testing.assert_array_equal(a, b)
        other = self.scores(logits, jax.random.split(jax.random.key(1), 1), temperature=1.0).token
        assert not np.array_equal(a, other)

    @pytest.mark.parametrize("bits", [0, 2**32 - 1])
    def test_b08_extreme_random_bits_stay_finite(self, bits):
        """B08, u = 0: with the same bits everywhere the noise is the same everywhere, and finite: the arg max is drawn."""
        constant = define_prng_impl(
            key_shape=(1,),
            seed=lambda seed: jnp.zeros(1, jnp.uint32),
            split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
            fold_in=lambda key, data: key,
            random_bits=lambda key, width, shape: jnp.full(shape, bits, jnp.dtype(f"uint{width}")),
        )
        logits = np.random.default_rng(0).normal(size=(6, 30))
        logits[:, MASK] = -9
        scores = self.scores(logits, jax.random.split(jax.random.key(0, impl=constant), 1), temperature=0.5)
        np.testing.assert_array_equal(scores.token[0], logits.argmax(-1))

    @pytest.mark.parametrize("vocab", [32_768, pytest.param(126_464, marks=pytest.mark.slow)])
    def test_b08_chi_square_with_a_rare_class(self, vocab, monkeypatch):
        """B08: 1 id in 64 is common, the others share 0.1 %: rarer, each, than the steps of a float32 uniform below 1."""
        draws, gumbel = 20_000, jax.random.gumbel
        common = np.arange(vocab) % 64 == 0
        share = np.where(common, 0.999 / common.sum(), 0.001 / (~common).sum())
        assert share[~common].max() < 2**-24
        logits = jnp.asarray(np.log(share)[None, None], jnp.float32)
        spec = dataclasses.replace(SPEC, vocab_size=vocab, mask_id=vocab - 1)

        def draw(keys, always):
            # The noise as a branch, which changes no number: folded into the arg max it would take five times as long.
            branch = lambda *args, **kwargs: jax.lax.cond(  # noqa: E731
                always, lambda: gumbel(*args, **kwargs), lambda: jnp.zeros(args[1])
            )
            monkeypatch.setattr(jax.random, "gumbel", branch)
            sampling = Sampling(temperature=1.0, exclude_mask=False)
            return jax.lax.map(lambda key: score_rows(logits, sampling, spec, key[None]).token[0, 0], keys)

        keys = jax.random.split(jax.random.key(0), draws)
        tokens = jax.jit(draw, compiler_options={"xla_backend_optimization_level": 3})(keys, True)
        counts = np.bincount(np.asarray(tokens), minlength=vocab)
        assert counts.sum() == draws
        rare = counts[~common].sum()
        chi = chi_square([draws - rare, rare], [0.999, 0.001])
        assert chi < 10.83, f"{rare} rare draws, {draws // 1000} expected (1 degree of freedom, p = 0.001)"
        ranges = counts[common].reshape(8, -1).sum(axis=1)
        chi = chi_square(ranges, np.full(8, 1 / 8))
        assert chi < 24.32, f"common ids over eight ranges: {ranges} (7 degrees of freedom, p = 0.001)"

    def test_b08_the_decode_loop_draws_from_the_distribution(self):
        """Under an order that does not look at what was drawn, what is committed follows softmax(logits / T)."""
        probability, length = np.array([0.4, 0.2, 0.15, 0.1, 0.06, 0.05, 0.03, 0.01]), 32
        table = np.full((4 + length, 30), -1e4)
        table[:, 5:13] = 0.7 * np.log(probability)
        decoder = decoders.vanilla(gen_length=length, steps=4, order="random", temperature=0.7)
        model, prompts = TableModel(table), [PROMPT] * 64
        state = engine.decode(model, decoder, engine.init_state(model, decoder, prompts))
        tokens = np.asarray(state.generated)
        assert int(state.passes) == 4 and len({tuple(row) for row in tokens}) == 64
        for drawn in (tokens, tokens[np.asarray(state.committed_at) == 3]):  # also what the last of the passes drew
            chi = chi_square(np.bincount(drawn.ravel() - 5, minlength=8), probability)
            assert chi < 24.32, "7 degrees of freedom, p = 0.001"

    def test_confidence_is_that_of_the_plain_softmax_unless_filtered(self):
        logits = np.log(np.array([[0.7, 0.2, 0.1] + [1e-12] * 27]))
        plain = self.scores(logits, temperature=0.5)
        probability = np.array([0.7, 0.2, 0.1])
        np.testing.assert_allclose(plain.confidence[0, 0], probability[plain.token[0, 0]], rtol=1e-5)
        tempered = self.scores(logits, temperature=0.5, filtered_confidence=True)
        np.testing.assert_allclose(
            tempered.confidence[0, 0], (probability**2 / (probability**2).sum())[tempered.token[0, 0]], rtol=1e-5
        )

    @pytest.mark.parametrize(
        ("settings", "kept"), [(dict(top_k=2), {0, 1}), (dict(top_p=0.75), {0, 1}), (dict(top_p=0.6), {0})]
    )
    def test_filters(self, settings, kept):
        logits = np.tile(np.log(np.array([0.7, 0.2, 0.1] + [1e-12] * 27)), (400, 1))
        tokens = set(np.asarray(self.scores(logits, temperature=1.0, **settings).token[0]).tolist())
        assert tokens == kept


def test_b08_no_float64_is_asked_for():
    """B08: nothing in a sampled decode asks for float64 (pytest turns that warning into an error)."""
    answer(table_for([5] * 4, [0.9] * 4), decoders.parallel(gen_length=4, temperature=0.8))


def test_allowance_carries_over_and_ends():
    """With steps 4 on 8 masks a pass may commit 2; unused allowance is carried; sure positions wait for room."""
    rule = commit.Allowance(threshold=0.9, steps=4)
    sure = answer(table_for([5] * 8, [0.95] * 8), decoders.parallel(gen_length=8, block_length=8).replace(commit=rule))
    assert commits_a_pass(sure) == [2, 2, 2, 2]
    unsure = answer(table_for([5] * 8, [0.5] * 8), decoders.parallel(gen_length=8, block_length=8).replace(commit=rule))
    assert commits_a_pass(unsure) == [1] * 8 and unsure.stats.commits["fallback"] == 8


def test_guidance_moves_logits_away_from_the_masked_prompt():
    """Guidance is u + (s + 1)(c - u); with a table that ignores the prompt c = u, so nothing may change."""
    table = table_for([5, 6, 7, 8], [0.95, 0.6, 0.5, 0.4])
    plain = answer(table, decoders.parallel(gen_length=4))
    guided = answer(table, decoders.parallel(gen_length=4, guidance=3.0))
    np.testing.assert_allclose(guided.trace["confidence"], plain.trace["confidence"], rtol=1e-4)
    assert guided.stats.nfe == plain.stats.nfe


def test_logits_that_are_no_numbers_are_an_error():
    table = table_for([5, 6, 7, 8], [0.3, 0.4, 0.5, 0.6])
    table[5, 3] = np.nan
    with pytest.raises(RunError, match="logits are not finite"):
        answer(table, decoders.parallel(gen_length=4))
    # Elsewhere in a batch nothing is disturbed, and rows outside the span do not count.
    table = table_for([5, 6, 7, 8] + [5] * 4, [0.95] * 8)
    table[8:, 3] = np.nan
    model, decoder = TableModel(table), decoders.parallel(gen_length=8, block_length=4)
    state = engine.decode(model, decoder, engine.init_state(model, decoder, PROMPT))
    assert not bool(state.finite[0]) and int(state.nfe[0]) == 2 and state.generated[0, :4].tolist() == [5, 6, 7, 8]


def test_near_ties_do_not_count_deferred_tokens():
    result = answer(table_for([EOS, 5, EOT, 6], [0.9] * 4), decoders.parallel(gen_length=4, eos="last"))
    assert result.stats.near_ties == 0


def test_settings_are_those_that_were_given():
    decoder = decoders.vanilla(gen_length=64, block_length=16, steps=32, temperature=0.5)
    settings = decoder.settings()
    assert settings["steps"] == 32 and settings["steps_per_block"] == 8
    given = {name: settings[name] for name in decoders.METHODS["vanilla"].settings}
    assert decoders.vanilla(**given) == decoder
    both = commit.any_of(commit.threshold(0.9), commit.threshold(0.5))
    assert [rule["threshold"] for rule in decoder.replace(commit=both).settings()["rules"]] == [0.9, 0.5]
    assert "steps" not in decoder.replace(commit=both).settings()


@pytest.mark.parametrize("name", ["temperature", "guidance", "threshold"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e39, 10**400])
def test_numbers_beyond_the_device_are_refused(name, value):
    with pytest.raises(InputError, match=f"setting {name}="):
        decoders.parallel(**{name: value})


def test_temperatures_that_vanish_in_float32_are_refused():
    with pytest.raises(InputError, match=r"0, or at least 0.001"):
        decoders.parallel(temperature=1e-45)
    assert decoders.parallel(gen_length=np.int64(8), threshold=np.float32(0.5)).gen_length == 8


def test_rules_used_directly_are_bounded_and_checked():
    base = decoders.parallel(gen_length=32, block_length=8)
    floor = answer(np.zeros((36, 30)), base.replace(commit=commit.Quota(steps_per_block=16, quota="dream_floor")))
    assert floor.stats.nfe == 64
    for make in (
        lambda: commit.Quota(steps_per_block=0),
        lambda: commit.Origin(steps_per_block=-1),
        lambda: commit.Allowance(threshold=0.9, steps=0),
        lambda: commit.any_of(),
        lambda: commit.all_of(commit.threshold(0.5), commit.at_least_one(commit.threshold(0.9))),
    ):
        with pytest.raises(InputError):
            make()


@pytest.mark.parametrize(
    "prompts", ["abc", b"ab", {"a": 1}, None, [None], [5], [b"ab"], [[True]], [[1.0]], [[[1], [2, 3]]], [["a"]]]
)
def test_prompts_of_the_wrong_kind_are_refused(prompts):
    from polestar_jax.generation import stream

    model, decoder = TableModel(table_for([5], [0.9])), decoders.parallel(gen_length=1)
    for call in (generate, lambda *args: list(stream(*args))):
        with pytest.raises(InputError):
            call(model, None, prompts, decoder)


@pytest.mark.parametrize(
    "options", [dict(seed=-1), dict(seed=2**32), dict(seed=1.5), dict(batch_size=0), dict(batch_size=1.5)]
)
def test_options_of_the_wrong_kind_are_refused(options):
    with pytest.raises(InputError):
        generate(TableModel(table_for([5], [0.9])), None, [PROMPT], decoders.parallel(gen_length=1), **options)


def test_init_state_checks_its_shape():
    model, decoder = TableModel(table_for([5], [0.9])), decoders.parallel(gen_length=1)
    for options in (dict(columns=2), dict(columns=-5), dict(sequence_ids=[1, 2])):
        with pytest.raises(InputError):
            engine.init_state(model, decoder, PROMPT, **options)


def test_a_decoder_takes_policies_not_functions_or_classes():
    @commit.commit_rule
    def sure(scores, state, *, tau=0.9):
        return scores.confidence > tau

    base = decoders.parallel(gen_length=4)
    for wrong in (sure, lambda scores, state: scores.eligible, "threshold", object()):
        with pytest.raises(InputError, match=r"^commit .* is not accepted"):
            base.replace(commit=wrong)
    assert base.replace(commit=sure(tau=0.5)).settings()["commit"] == "sure"


def test_refreshes_are_counted():
    from polestar_jax.cache import NoCache
    from polestar_jax.decode.state import REFRESH_STEP

    @dataclasses.dataclass(frozen=True)
    class Refreshing(NoCache):
        def forward(self, model, wanted, state, plan):
            result = super().forward(model, wanted, state, plan)
            return result._replace(kind=jnp.full_like(result.kind, REFRESH_STEP), full=jnp.zeros_like(result.full))

    stats = answer(table_for([5, 6], [0.3, 0.3]), decoders.parallel(gen_length=2).replace(cache=Refreshing())).stats
    assert (stats.nfe, stats.refreshes, stats.full_forwards, stats.partial_forwards) == (2, 2, 0, 2)
