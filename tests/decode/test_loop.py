"""The loop itself: while_loop equals stream, batches equal single runs, compiles and memory."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from polestar_jax import commit, decoders
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.generation import generate, stream
from polestar_jax.models.denoiser import Denoiser
from tests.fakes import DREAM, MASK, SPEC, random_model

METHODS = {
    "vanilla": decoders.vanilla(gen_length=16, block_length=8),
    "vanilla, two a pass": decoders.vanilla(gen_length=16, block_length=8, steps=8),
    "vanilla, entropy": decoders.vanilla(gen_length=16, block_length=16, order="entropy", quota="dream_floor"),
    "vanilla, random": decoders.vanilla(gen_length=16, block_length=8, order="random"),
    "vanilla, origin": decoders.vanilla(gen_length=16, block_length=8, steps=8, order="origin"),
    "parallel": decoders.parallel(gen_length=16, block_length=8, threshold=0.6),
    "parallel, allowance": decoders.parallel(gen_length=16, block_length=16, threshold=0.6, steps=4),
    "parallel, sampled": decoders.parallel(gen_length=16, block_length=8, threshold=0.6, temperature=0.7),
    "guided": decoders.parallel(gen_length=16, block_length=8, threshold=0.6, guidance=1.5),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3] * 20]
# One family of each, and both of the first.
FAST = {
    "llada": ("vanilla", "vanilla, two a pass", "vanilla, random", "parallel", "guided"),
    "dream": ("vanilla", "vanilla, entropy", "vanilla, origin", "parallel, allowance", "parallel, sampled"),
}
SPECS = {"llada": SPEC, "dream": DREAM}
CASES = [
    pytest.param(name, family, marks=[] if name in FAST[family] else pytest.mark.slow)
    for family in SPECS
    for name in METHODS
]


def final(model, decoder, prompts, **kwargs):
    return engine.decode(model, decoder, engine.init_state(model, decoder, prompts, **kwargs))


@pytest.mark.parametrize(("name", "family"), CASES)
def test_b03_batch_equals_single_runs_and_stream_equals_decode(name, family):
    """B03, B09: unequal prompts together give what each gives alone, and the Python loop gives what while_loop gives."""
    model, decoder = random_model(SPECS[family]), METHODS[name]
    batch = final(model, decoder, PROMPTS)
    assert not np.any(np.asarray(batch.generated) == MASK)
    for i, prompt in enumerate(PROMPTS):
        single = final(model, decoder, prompt, sequence_ids=[i])
        for field in ("nfe", "reason", "committed_at", "generated"):
            np.testing.assert_array_equal(getattr(batch, field)[i], getattr(single, field)[0], err_msg=f"{field} {i}")
    streamed = list(engine.steps(model, decoder, engine.init_state(model, decoder, PROMPTS)))
    assert len(streamed) == int(batch.passes)
    for field in ("tokens", "nfe", "reason", "committed_at", "done", "span_start", "full_forwards"):
        np.testing.assert_array_equal(getattr(streamed[-1], field), getattr(batch, field), err_msg=field)
    for before, after in itertools.pairwise(streamed):
        decided = np.asarray(before.generated) != MASK
        np.testing.assert_array_equal(np.asarray(after.generated)[decided], np.asarray(before.generated)[decided])


def test_b03_pad_content_changes_nothing():
    model, decoder = random_model(), METHODS["parallel"]
    state = engine.init_state(model, decoder, PROMPTS)
    noise = np.random.default_rng(0).integers(0, 27, state.tokens.shape)
    dirty = state.replace(tokens=jnp.where(state.positions < 0, jnp.asarray(noise, jnp.int32), state.tokens))
    assert not np.array_equal(dirty.tokens, state.tokens)
    np.testing.assert_array_equal(
        engine.decode(model, decoder, dirty).generated,
        engine.decode(model, decoder, engine.init_state(model, decoder, PROMPTS)).generated,
    )


def test_b03_logits_at_real_positions_ignore_padding():
    model = random_model()
    logits = jax.jit(lambda *args: model.logits(model(*args)))
    tokens = np.array([[1, 2, 3, 4, 5]])
    alone = logits(tokens, np.arange(5)[None])
    padded = np.concatenate([np.array([[9, 9, 9]]), tokens], axis=1)
    positions = np.arange(8)[None] - 3
    together = logits(padded, positions, positions >= 0)[:, 3:]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_b09_repeated_prompt_gives_identical_tokens():
    model, decoder = random_model(), METHODS["parallel"]
    state = final(model, decoder, [[1, 2, 3]] * 4)
    assert (np.asarray(state.generated) == np.asarray(state.generated)[0]).all()


@pytest.mark.parametrize("spec", [SPEC, DREAM], ids=["llada", "dream"])
def test_decode_is_jittable(spec):
    model, decoder = random_model(spec), METHODS["parallel"]
    inside = jax.jit(lambda state: engine.decode(model, decoder, state).generated)
    state = engine.init_state(model, decoder, PROMPTS)
    np.testing.assert_array_equal(inside(state), final(model, decoder, PROMPTS).generated)


def test_a_finished_state_is_inert():
    model, decoder = random_model(), METHODS["parallel"].replace(trace=Trace())
    done = final(model, decoder, PROMPTS)
    again = jax.jit(lambda state: engine.step(model, decoder, state))(done)
    for field in dataclasses.fields(done):
        if field.name not in ("passes", "key", "active"):
            jax.tree.map(np.testing.assert_array_equal, getattr(again, field.name), getattr(done, field.name))


def test_b55_one_compile_a_bucket():
    model = random_model()
    decoder = decoders.parallel(gen_length=8, block_length=8, threshold=0.55)
    engine.forget_programs()
    for length in (17, 23, 30, 17, 32):
        generate(model, None, [[1] * length], decoder)
    assert len(engine._compiled) == 1
    generate(model, None, [[1] * 33], decoder)
    assert len(engine._compiled) == 2
    generate(model, None, [[1] * 40], decoders.parallel(gen_length=8, block_length=8, threshold=0.55))
    assert len(engine._compiled) == 2  # an equal decoder is the same program


def test_b56_memory_does_not_depend_on_steps_and_the_state_is_donated():
    model = random_model()
    sizes = {}
    for steps in (2, 64):
        decoder = decoders.vanilla(gen_length=64, block_length=64, steps=steps)
        state = engine.init_state(model, decoder, [1, 2, 3])
        graph, weights = engine.split(model)
        sizes[steps] = engine._decode.lower(graph, weights, decoder, state).compile().memory_analysis()
    assert sizes[2].temp_size_in_bytes == pytest.approx(sizes[64].temp_size_in_bytes, abs=4096)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
    assert sizes[64].alias_size_in_bytes >= held


def test_b58_no_graph_traversal_in_the_loop(monkeypatch):
    calls = {"split": 0, "merge": 0}
    for name in calls:
        original = getattr(nnx, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(nnx, name, counted)
    model = random_model(seed=5)
    for steps in (2, 48):
        calls.update(split=0, merge=0)
        decoder = decoders.vanilla(gen_length=48, block_length=48, steps=steps, eps=0.25)
        passes = list(engine.steps(model, decoder, engine.init_state(model, decoder, [1, 2])))
        assert len(passes) == steps
        assert calls == {"split": 1, "merge": 1}, "once before the loop, and once when the step is traced"


def test_b61_logits_only_for_the_span():
    spec = dataclasses.replace(SPEC, vocab_size=126_464, d_model=16, n_layers=1, max_length=2048)
    model = Denoiser.abstract(spec, jnp.float32)
    graph, weights = engine.split(model)
    decoder = decoders.parallel(gen_length=256, block_length=32)
    real = random_model()
    state = engine.init_state(real, decoder, [1] * 768)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    memory = engine._decode.lower(graph, weights, decoder, state).compile().memory_analysis()
    full_logits = 1024 * spec.vocab_size * 4
    assert memory.temp_size_in_bytes < full_logits / 4, "the head must read the span's rows only"
    assert memory.temp_size_in_bytes > 32 * spec.vocab_size * 4, "the check must see the logits it is about"


@pytest.mark.parametrize("method", ["vanilla", "parallel"])
def test_b16_same_block_order_for_both_families(method):
    """B16: a Dream decoder walks the same blocks as a LLaDA one, left to right, none begun before the last is complete."""
    for spec in (SPEC, DREAM):
        model = random_model(spec)
        decoder = decoders.METHODS[method].build(gen_length=32, block_length=8)
        state = final(model, decoder, [1, 2, 3])
        step = np.asarray(state.committed_at[0]).reshape(4, 8)
        assert all(step[i].max() < step[i + 1].min() for i in range(3))


def test_b16_steps_under_a_threshold_are_explained():
    about = decoders.METHODS["parallel"].settings["steps"].help
    assert "caps commits" in about and "under a threshold steps is no number of passes" in about


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1, 30], "prompt id 30 is outside the vocabulary 0..29"),
        ([-200, 1], "prompt id -200 is outside the vocabulary 0..29"),
        ([1, MASK], "prompt contains the mask token 29"),
    ],
)
def test_bad_prompts_are_refused(prompt, message):
    with pytest.raises(InputError, match=message):
        generate(random_model(), None, [prompt], METHODS["parallel"])


def test_b37_too_long_is_refused_before_compiling():
    spec = dataclasses.replace(SPEC, max_length=32)
    engine.forget_programs()
    with pytest.raises(
        InputError, match=r"prompt of 30 tokens and gen_length 8 make 38, more than the model's max_length 32"
    ):
        generate(random_model(spec), None, [[1] * 30], decoders.parallel(gen_length=8))
    assert not engine._compiled
    # The bucket is longer than the model's limit here, but no position is.
    assert len(generate(random_model(spec), None, [[1] * 24], decoders.parallel(gen_length=8))[0].tokens) == 8


def test_b77_tokenizer_limits_play_no_part():
    """B77: tokenizers give 1e30 as their limit; ours is the model's, and the mask id is the config's."""
    with pytest.raises(InputError, match="more than the model's max_length 1024"):
        generate(random_model(), None, [[1] * 1017], decoders.parallel(gen_length=8))


def test_b05_dream_reads_the_row_before():
    """B05: the token at position i is the arg max of row i - 1, also for the first position of a block."""
    model = random_model(DREAM)
    decoder = decoders.vanilla(gen_length=12, block_length=4)
    state = engine.init_state(model, decoder, [1, 2, 3, 4, 5])
    full = jax.jit(lambda tokens: model.logits(model(tokens[None], jnp.arange(17)[None]))[0])
    previous = state
    for after in engine.steps(model, decoder, state):
        tokens = np.concatenate([[1, 2, 3, 4, 5], np.asarray(previous.generated[0])])
        logits = np.array(full(tokens))
        logits[:, MASK] = -np.inf
        (new,) = np.flatnonzero(np.asarray(previous.generated[0]) != np.asarray(after.generated[0]))
        assert int(after.generated[0, new]) == logits[5 + new - 1].argmax()
        previous = after


def test_b71_left_padding_does_not_move_positions():
    """B71: a canvas at any offset gives the same tokens as one without padding."""
    model, decoder = random_model(), METHODS["parallel"]
    plain = final(model, decoder, [1, 2, 3, 4, 5], columns=5)
    for columns in (6, 10, 32, 64):
        np.testing.assert_array_equal(
            final(model, decoder, [1, 2, 3, 4, 5], columns=columns).generated, plain.generated
        )


def test_stream_records_what_decode_records():
    model, decoder = random_model(), METHODS["parallel"]
    *_, last = stream(model, None, PROMPTS, decoder, trace=Trace("tokens", "committed", "block"))
    whole = final(model, decoder.replace(trace=Trace("tokens", "committed", "block")), PROMPTS)
    jax.tree.map(np.testing.assert_array_equal, last.trace, whole.trace)
    committed = np.asarray(whole.trace["committed"])
    assert (committed.sum(axis=0) == 1).all(), "every position is committed exactly once"


def test_a_rule_is_a_function_and_progress_is_guaranteed():
    @commit.commit_rule
    def low_entropy(scores, state, *, tau=0.3):
        return -scores.neg_entropy < tau

    model = random_model()
    base = METHODS["parallel"]
    never = final(model, base.replace(commit=low_entropy(tau=-1.0)), [1, 2, 3])
    assert int(never.nfe[0]) == 16 and (np.asarray(never.reason) == 1).all()
    always = final(model, base.replace(commit=low_entropy(tau=1e9)), [1, 2, 3])
    assert int(always.nfe[0]) == 2
    both = commit.at_least_one(commit.all_of(commit.threshold(0.6), low_entropy(tau=1e9)))
    np.testing.assert_array_equal(
        final(model, base.replace(commit=both), [1, 2, 3]).committed_at, final(model, base, [1, 2, 3]).committed_at
    )


@pytest.mark.parametrize(("dtype", "highest"), [("float32", True), ("bfloat16", False)])
def test_b21_float32_never_multiplies_in_tf32(dtype, highest):
    """B21: in float32 every product asks for the highest precision; bfloat16 leaves the choice to the device."""
    graph, weights = engine.split(Denoiser.abstract(SPEC, jnp.dtype(dtype)))
    decoder = METHODS["parallel"]
    state = engine.init_state(random_model(), decoder, [1, 2, 3])
    products = [
        line
        for line in engine._decode.lower(graph, weights, decoder, state).as_text().splitlines()
        if "dot_general" in line
    ]
    # A layer has qkv, scores, weighted values, output, gate and up, down; then the head.
    assert len(products) == 6 * SPEC.n_layers + 1
    assert all(("precision = [HIGHEST, HIGHEST]" in line) == highest for line in products)
