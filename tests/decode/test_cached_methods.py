"""EntropyCache, dKV-Cache, DPad and AdaBlock against plain loops of their descriptions, and the properties each promises."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import cache, decoders, schedule
from polestar_jax.decode import engine
from polestar_jax.decode.sampling import SUFFIX_NOISE
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.generation import generate
from tests.fakes import DREAM, SPEC, TableModel, lively_model, table_for
from tests.oracles import cached

PROMPTS = [[3, 1, 4, 1, 5], list(range(1, 20))]
SPECS = pytest.mark.parametrize("spec", [SPEC, DREAM], ids=["llada", "dream"])
LENGTHS = dict(gen_length=24, block_length=8)


@functools.cache
def model_of(spec, seed=1):
    return lively_model(spec, seed)


def decoded(model, decoder, prompts=PROMPTS):
    """All prompts together."""
    decoder = decoder.replace(trace=Trace("tokens", "committed"))
    return generate(model, None, prompts, decoder, batch_size=len(prompts))


def same(answers, runs):
    """Tokens pass for pass, passes, and rows."""
    for answer, run in zip(answers, runs, strict=True):
        np.testing.assert_array_equal(answer.trace["tokens"], run.history)
        assert (answer.stats.nfe, answer.stats.full_forwards, answer.stats.rows) == (run.nfe, run.full, run.rows)


def open_rows(run, positions):
    """The rows of undecided positions, and those that score them."""
    return [run.p + i for i in positions] + [run.p + i - run.shift for i in positions]


@pytest.mark.parametrize(
    ("spec", "bound", "recent"),
    [
        (SPEC, 1.0, 3),
        (DREAM, 2.0, 8),
        pytest.param(DREAM, 1.0, 3, marks=pytest.mark.slow),
        pytest.param(SPEC, 2.0, 8, marks=pytest.mark.slow),
    ],
    ids=["llada-often", "dream-seldom", "dream-often", "llada-seldom"],
)
def test_entropy_cache_equals_a_plain_loop(spec, bound, recent):
    def rows(run):
        if run.nfe == 0 or run.last_entropy > bound:
            return None
        decided = sorted((i for i in range(run.g) if run.committed_at[i] >= 0), key=lambda i: (-run.committed_at[i], i))
        inside = [i for i in run.undecided if run.start <= i < run.end]
        return [run.p + i for i in decided[:recent]] + open_rows(run, inside)

    decoder = decoders.entropy_cache(**LENGTHS, threshold=0.6, entropy_threshold=bound, recent=recent)
    runs = [cached.decode(model_of(spec), p, 24, block=8, rows=rows, rule=cached.above(0.6)) for p in PROMPTS]
    assert any(0 < run.full < run.nfe for run in runs), "both kinds of pass must occur"
    same(decoded(model_of(spec), decoder), runs)


@pytest.mark.parametrize("spec", [SPEC, pytest.param(DREAM, marks=pytest.mark.slow)], ids=["llada", "dream"])
def test_b15_caches_that_refresh_in_every_pass_are_no_cache(spec):
    """B15: tokens and passes equal those without a cache; and entropies above all bounds refresh once, or at the entries."""
    model = model_of(spec)
    plain = decoded(model, decoders.parallel(**LENGTHS))
    for method in (
        decoders.entropy_cache(**LENGTHS, entropy_threshold=-1),
        decoders.dkv_cache(**LENGTHS, refresh_every=1, commit="threshold"),
    ):
        same = decoded(model, method)
        assert [(a.tokens, a.stats.nfe) for a in same] == [(a.tokens, a.stats.nfe) for a in plain]
    once = decoded(model, decoders.entropy_cache(**LENGTHS, entropy_threshold=1e6, entry_full=spec is DREAM))
    assert [a.stats.full_forwards for a in once] == ([3, 3] if spec is DREAM else [1, 1])


def test_b15_drift_is_reported():
    """B15: what attends to a cache that is not refreshed moves all the same, and that is in the trace."""
    decoder = decoders.polestar(**LENGTHS, cache="dual").replace(trace=Trace("drift"))
    (answer,) = generate(model_of(SPEC), None, [PROMPTS[0]], decoder)
    assert np.nanmax(answer.trace["drift"]) > 1e-3


@pytest.mark.parametrize("spec", [pytest.param(SPEC, marks=pytest.mark.slow), DREAM], ids=["llada", "dream"])
def test_dkv_cache_equals_a_plain_loop(spec):
    def rows(run):
        if run.span_passes < 2 or run.span_passes % 4 == 0:
            return None
        fresh = [run.p + i for i in range(run.g) if run.committed_at[i] == run.nfe - 1]
        return fresh + open_rows(run, run.undecided)

    runs = [cached.decode(model_of(spec), p, 24, block=8, rows=rows, rule=cached.one) for p in PROMPTS]
    answers = decoded(model_of(spec), decoders.dkv_cache(**LENGTHS, refresh_every=4))
    same(answers, runs)
    assert answers[0].stats.nfe == 24 and answers[0].stats.full_forwards == 9


def test_dkv_passes_have_the_fewest_rows_that_hold_what_is_left():
    policy = cache.DelayedCache(gen_length=40, block_length=8, refresh_every=8)
    assert policy.sizes == (41, 21, 11)
    assert policy.plans[1].also == ("21", "11")


@pytest.mark.parametrize(
    ("spec", "inside"),
    [
        (SPEC, "none"),
        (DREAM, "dual"),
        pytest.param(DREAM, "none", marks=pytest.mark.slow),
        pytest.param(SPEC, "dual", marks=pytest.mark.slow),
    ],
    ids=["llada-none", "dream-dual", "dream-none", "llada-dual"],
)
def test_dpad_equals_a_plain_loop_that_hides_what_was_drawn(spec, inside):
    model = model_of(spec)
    settings = dict(threshold=0.6, suffix_window=12, suffix_decay=3.0, suffix_scale=2.0, suffix_cache=inside)
    decoder = decoders.dpad(**LENGTHS, **settings)
    state = engine.init_state(model, decoder, PROMPTS)
    dropped = []

    def entered(run, sequence):
        key = jax.random.fold_in(jax.random.fold_in(state.key[sequence], run.nfe), SUFFIX_NOISE)
        draw = np.asarray(jax.random.uniform(key, (24,)))
        run.visible = np.ones(len(run.tokens), bool)
        for i in range(run.end, 24):
            j = i - run.end
            z = 3.0 * j / 11
            keep = 2.0 * np.exp(-z * z / 2) / np.sqrt(2 * np.pi) if j < 12 else 0.0
            run.visible[run.p + i] = draw[i] < keep
        dropped.append(int((~run.visible).sum()))

    def rows(run):
        if inside == "none" or run.span_passes == 0:
            return None
        return list(range(run.p + run.start - run.shift, run.p + run.end))

    runs = [
        cached.decode(
            model, p, 24, block=8, rows=rows, rule=cached.above(0.6), enter=functools.partial(entered, sequence=i)
        )
        for i, p in enumerate(PROMPTS)
    ]
    assert max(dropped) > 4
    same(decoded(model, decoder), runs)


@pytest.mark.parametrize(
    ("inside", "plain"),
    [
        ("none", "parallel"),
        pytest.param("prefix", "fast_dllm_prefix", marks=pytest.mark.slow),
        pytest.param("dual", "fast_dllm_dual", marks=pytest.mark.slow),
    ],
)
def test_dpad_that_keeps_all_is_the_policy_inside(inside, plain):
    model = model_of(SPEC)
    kept = decoders.dpad(**LENGTHS, suffix_cache=inside, suffix_scale=1e9, suffix_decay=0.0)
    want = decoded(model, decoders.METHODS[plain].build(**LENGTHS))
    assert [a.tokens for a in decoded(model, kept)] == [a.tokens for a in want]


def test_dpad_without_a_window_sees_no_suffix():
    policy = cache.SuffixDropout(inside=cache.NoCache(), suffix_scale=2.0, suffix_decay=4.0, suffix_window=0)
    state = engine.init_state(model_of(SPEC), decoders.parallel(**LENGTHS), PROMPTS)
    dropped = np.asarray(policy.drop(state))[:, state.prompt_columns :]
    assert not dropped[:, :8].any() and dropped[:, 8:].all()


@SPECS
@pytest.mark.parametrize("kind", ["none", pytest.param("dual", marks=pytest.mark.slow)])
def test_adablock_equals_a_plain_loop(spec, kind):
    delimiters, bound = (27, 18, 16), 0.25

    def cut(run, guesses):
        near = [i for i in sorted(guesses) if i - run.start < 6 and guesses[i].token in delimiters]
        best = max(near, key=lambda i: guesses[i].confidence, default=None)
        if best is not None and guesses[best].confidence >= bound:
            return best + 1
        return min(run.start + 4, 24)

    def rows(run):
        if kind == "none" or run.span_passes == 0:
            return None
        return list(range(run.p + run.start - run.shift, run.p + run.end))

    decoder = decoders.adablock(
        gen_length=24, block_length=4, threshold=0.6, delimiters=delimiters, delimiter_threshold=bound, cache=kind
    )
    runs = [
        cached.decode(model_of(spec), p, 24, block=4, rows=rows, rule=cached.above(0.6), longest=6, cut=cut)
        for p in PROMPTS
    ]
    same(decoded(model_of(spec), decoder), runs)


def test_adablock_without_a_sure_delimiter_has_plain_blocks():
    model = model_of(SPEC)
    want = decoded(model, decoders.parallel(**LENGTHS))
    for settings in (dict(delimiters=(27,), delimiter_threshold=2.0), dict(delimiters=(), delimiter_threshold=0.1)):
        ours = decoded(model, decoders.adablock(**LENGTHS, **settings))
        assert [(a.tokens, a.stats.nfe) for a in ours] == [(a.tokens, a.stats.nfe) for a in want]
    each = decoded(model, decoders.adablock(**LENGTHS, delimiters=(27, 18), delimiter_threshold=0.1, threshold=1.5))
    assert [a.stats.nfe for a in each] == [24, 24]


def test_adablock_ends_a_block_at_the_first_of_the_surest_delimiters():
    table = table_for([5, 7, 6, 7, 5, 5, 5, 5], [0.5, 0.6, 0.9, 0.6, 0.9, 0.9, 0.9, 0.9])
    decoder = decoders.adablock(gen_length=8, block_length=8, delimiters=(7,), delimiter_threshold=0.5, threshold=0.4)
    policy = decoder.schedule
    assert (policy.search, policy.capacity) == (2, 8)
    state = engine.init_state(TableModel(table), decoder, [1, 2, 3, 4])
    ends = [int(after.span_start[0]) for after in engine.steps(TableModel(table), decoder, state)]
    assert ends[0] == 2, "positions 0 and 1 are looked at; the delimiter at 1 ends the block"


def test_adablock_takes_its_delimiters_from_the_model_or_its_tokenizer():
    plain = schedule.AdaBlock(gen_length=64, block_length=16)
    published = decoders.adablock(gen_length=64).schedule

    class Words:
        def ids_containing(self, text):
            return (13,) if text == "\n" else ()

    assert plain.for_tokens(SPEC, Words()).delimiters == (13,) and published == schedule.AdaBlock(
        gen_length=64, block_length=32
    )
    llada = SPEC.__class__(**{**SPEC.__dict__, "mask_id": 126336, "vocab_size": 126464})
    assert plain.for_tokens(llada, Words()).delimiters == (198,)
    assert decoders.adablock(gen_length=64).for_model(DREAM).schedule.delimiter_threshold == 0.5
    with pytest.raises(InputError, match="knows no delimiters: give delimiters="):
        generate(model_of(SPEC), None, [[1, 2]], decoders.adablock(gen_length=8))


def test_the_embedded_tokenizer_names_its_new_lines():
    import polestar_jax as pj

    _, tokenizer = pj.load("tiny", dtype="float32")
    ids = tokenizer.ids_containing("\n")
    assert ids and all("\n" in tokenizer.hf.decode([i]) for i in ids)
    assert jnp.asarray(ids).max() < tokenizer.size
