"""The Monte-Carlo likelihood against sums over all masks, against a joint distribution, and against decoding."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from polestar_jax import decoders
from polestar_jax.errors import InputError
from polestar_jax.eval.likelihood import is_greedy, log_likelihood, make_patterns
from polestar_jax.generation import generate, logits
from tests.fakes import DREAM, MASK, SPEC, TableModel, lively_model

PROMPT = [3, 7, 1, 4, 9]


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - np.log(np.exp(row - row.max()).sum()) - row.max()


def reference(model, prompt: list[int], answer: list[int]) -> float:
    """The expectation, pattern by pattern, each from a full forward over prompt and masked answer."""
    length, shift = len(answer), model.spec.logit_shift
    total = 0.0
    for count in range(1, length + 1):
        for masked in itertools.combinations(range(length), count):
            ids = list(prompt) + [model.spec.mask_id if i in masked else token for i, token in enumerate(answer)]
            rows = logits(model, ids)
            found = sum(log_softmax(rows[len(prompt) + i - shift])[answer[i]] for i in masked)
            total += length / count * found / math.comb(length, count) / length
    return total


class Joint(nnx.Module):
    """Exact conditionals of one joint distribution over three answer tokens out of three, behind a prompt of five."""

    def __init__(self, seed: int):
        self.spec = dataclasses.replace(SPEC, vocab_size=5, mask_id=4, eos_id=3, stop_ids=(3,))
        table = np.random.default_rng(seed).dirichlet(np.full(27, 0.4))
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32)

    def __call__(self, tokens, positions, valid=None):
        answer = jax.lax.dynamic_slice_in_dim(tokens, len(PROMPT), 3, axis=1)
        cases = jnp.asarray(list(itertools.product(range(3), repeat=3)))  # [27, 3]
        fits = (answer[:, None] == cases) | (answer[:, None] == 4)  # [b, 27, 3]
        weight = self.table[...] * fits.all(-1)
        given = jnp.stack([(weight[..., None] * (cases[:, i, None] == jnp.arange(3))).sum(1) for i in range(3)], axis=1)
        rows = jnp.concatenate([jnp.log(given), jnp.full((*given.shape[:2], 2), -jnp.inf)], axis=-1)  # [b, 3, 5]
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros((*tokens.shape, 5)), rows, len(PROMPT), axis=1)

    def logits(self, rows):
        return rows


# --- the estimate


@pytest.mark.parametrize("spec", [SPEC, DREAM], ids=["llada", "dream"])
@pytest.mark.parametrize("length", [1, 3, 4])
def test_with_all_patterns_the_estimate_is_the_expectation(spec, length):
    model = lively_model(spec)
    answer = [5, 11, 2, 8][:length]
    found = log_likelihood(model, PROMPT, answer, n_samples=15, batch_size=4)
    assert found == pytest.approx(reference(model, PROMPT, answer), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_of_a_joint_distribution_it_is_the_log_likelihood(seed):
    model = Joint(seed)
    prompt = [0, 1, 2, 0, 1]
    for place, answer in enumerate(itertools.product(range(3), repeat=3)):
        expected = math.log(float(model.table[...][place]))
        assert log_likelihood(model, prompt, answer, n_samples=7) == pytest.approx(expected, rel=1e-4)


def test_of_independent_tokens_it_is_their_sum_whatever_is_masked():
    table = np.random.default_rng(0).normal(size=(12, 30)).astype(np.float32)
    answer = [4, 9, 2, 2, 17, 1, 0]
    expected = sum(log_softmax(table[5 + i])[token] for i, token in enumerate(answer))
    assert log_likelihood(TableModel(table), PROMPT, answer, n_samples=127) == pytest.approx(expected, rel=1e-5)


def test_samples_come_near_the_expectation_and_nearer_with_more():
    model = lively_model()
    answer = [5, 11, 2, 8, 20, 6]
    exact = log_likelihood(model, PROMPT, answer, n_samples=63)
    few, many = (
        [log_likelihood(model, PROMPT, answer, n_samples=count, seed=seed, batch_size=16) for seed in range(12)]
        for count in (8, 62)
    )
    off = np.std(many) / math.sqrt(len(many))
    assert np.std(many) > 0
    assert abs(np.mean(many) - exact) < 4 * off
    assert np.std(many) < np.std(few)


def test_it_is_a_function_of_its_arguments():
    model = lively_model()
    answer = [5, 11, 2, 8, 20, 6, 3, 3]
    found = [log_likelihood(model, PROMPT, answer, n_samples=20, seed=seed, batch_size=7) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    other_batch = log_likelihood(model, PROMPT, answer, n_samples=20, seed=1, batch_size=3)
    assert other_batch == pytest.approx(found[0], rel=1e-5)


# --- the masks


@pytest.mark.parametrize("length", range(1, 7))
def test_every_pattern_weighs_as_often_as_it_is_drawn(length):
    masked, weights = make_patterns(length, 63, seed=0)
    assert len(masked) == len(np.unique(masked, axis=0)) == 2**length - 1
    counts = masked.sum(axis=1)
    # Over the patterns with l masks the weights sum to 1 / l, that is (1 / L) times the factor L / l.
    for count in range(1, length + 1):
        assert weights[counts == count].sum() == pytest.approx(1 / count)


def test_sampled_masks_are_uniform_in_number_and_place():
    masked, weights = make_patterns(20, 2000, seed=3)
    times = weights * masked.sum(axis=1) / 20 * 2000
    assert times.sum() == pytest.approx(2000)
    counts = np.bincount(masked.sum(axis=1), weights=times, minlength=21)
    assert counts[0] == 0
    assert abs(counts[1:] - 100).max() <= 1  # in equal shares
    assert abs(times @ masked / 2000 - 10.5 / 20).max() < 0.05  # each place in about half of them
    assert len(make_patterns(2, 2, seed=0).masked) <= 2  # fewer than the three there are: sampled


def test_sampled_weights_have_the_right_mean():
    """With every log probability -1 the estimate is -L, whatever is drawn."""
    for seed in range(5):
        masked, weights = make_patterns(13, 16, seed)
        assert weights @ masked.sum(axis=1) == pytest.approx(13)


# --- greedy answers


@pytest.mark.parametrize("spec", [SPEC, DREAM], ids=["llada", "dream"])
def test_what_decoding_gives_is_greedy_and_nothing_else(spec):
    model = lively_model(spec)
    for prompt in (PROMPT, [2], [8, 8, 1]):
        decoder = decoders.vanilla(gen_length=6, block_length=6)
        tokens = generate(model, None, [prompt], decoder)[0].tokens
        assert is_greedy(model, prompt, tokens)
        for place in range(6):
            assert not is_greedy(model, prompt, [*tokens[:place], (tokens[place] + 1) % 27, *tokens[place + 1 :]])


# --- refusals


def test_an_empty_answer_is_certain():
    assert log_likelihood(lively_model(), PROMPT, []) == 0
    assert is_greedy(lively_model(), PROMPT, [])


@pytest.mark.parametrize(
    ("prompt", "answer", "words"),
    [
        ([], [1], "prompt is empty"),
        (PROMPT, [MASK], "the answer contains the mask token 29"),
        (PROMPT, [30], "outside the vocabulary"),
        ([MASK], [1], "mask token"),
        ([1] * 1020, [1] * 5, "more than the model's max_length 1024"),
    ],
)
def test_ids_that_cannot_be_scored_are_refused(prompt, answer, words):
    for refuse in (log_likelihood, is_greedy):
        with pytest.raises(InputError, match=words):
            refuse(lively_model(), prompt, answer)


@pytest.mark.parametrize("option", ["n_samples", "batch_size"])
def test_counts_must_be_counts(option):
    for value in (0, -1, 1.5, True):
        with pytest.raises(InputError, match=rf"{option} .* a whole number >= 1"):
            log_likelihood(lively_model(), PROMPT, [1], **{option: value})
