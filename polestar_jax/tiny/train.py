"""Training of the embedded model from nothing: LLaDA's objective on the package's own tasks.

The learning rate is high while copying is learnt, lower after that, and falls linearly at the end. Two habits fit the model to
block-wise decoding with caches:

* from ``adapt_from`` on, some masks are drawn block-wise (clean before, masked after) instead of uniformly over the
  response, and half of the examples hide the response from the prompt rows, so that the model works in the response rows
  and a cached prompt stays true;
* canvases are tight for most steps and as long as decoding uses them in the rest, so that the model fills a long response
  with end-of-text.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec
from polestar_jax.tiny import vocabulary as words
from polestar_jax.tiny.tasks import TrainingExamples

SPEC = ModelSpec(
    family="llada", d_model=128, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32, d_ff=384, vocab_size=416,
    max_length=512, rope_theta=10000.0, norm_eps=1e-5, qkv_bias=False, logit_shift=0,
    mask_id=words.MASK, eos_id=words.EOS, bos_id=words.BOS, stop_ids=(words.EOS,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyper-parameters; ``steps`` counts optimiser steps, the last ``decay_steps`` of them with a falling rate, all from
    ``settle_from`` on at ``settled_rate`` of the first one."""

    steps: int = 22000
    decay_steps: int = 9000
    warmup_steps: int = 100
    batch: int = 32
    seed: int = 0
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.01
    settle_from: int = 500
    settled_rate: float = 0.4
    ema: float = 0.998
    block_masks: float = 0.3
    hide_share: float = 0.5
    adapt_from: int = 14000
    long_share: float = 0.06
    long_share_decay: float = 0.3

    def rate(self, step: jax.Array) -> jax.Array:
        """Learning-rate factor in 0..1 at a step (zero-based)."""
        warm = jnp.minimum(1.0, (step + 1) / self.warmup_steps)
        settled = jnp.where(step < self.settle_from, 1.0, self.settled_rate)
        return warm * settled * jnp.clip((self.steps - step) / max(1, self.decay_steps), 0.01, 1.0)


REPORT_EVERY = 100
TIGHT_CANVASES = (24, 32, 40, 56, 72)
LONG_CANVASES = ((96, 1), (128, 1), (192, 2), (320, 4))  # (positions, by how much the batch shrinks)


def batches(recipe: Recipe, start: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches (tokens i32 [b, n] padded with end-of-text, prompt lengths i32 [b]) from step ``start`` on.

    Examples wait in one queue per canvas length until a queue fills a batch, so that every task keeps its share; now and
    then a full batch is put on a longer canvas. The sequence depends on the recipe's seed alone.
    """
    tokenizer = words.build_tokenizer()
    examples = TrainingExamples(recipe.seed)
    queues: dict[int, list] = {size: [] for size in TIGHT_CANVASES}
    rng = np.random.default_rng(recipe.seed)
    held: collections.deque = collections.deque()  # examples left over by a batch on a long, hence narrow, canvas
    step = 0
    while True:
        example = examples.draw(step)
        prompt = tokenizer.encode(f"<|startoftext|><|user|>{example.prompt}<|assistant|>").ids
        row = (len(prompt), prompt + tokenizer.encode(" " + example.answer).ids)
        size = next(size for size in TIGHT_CANVASES if size > len(row[1]) + 1)
        queues[size].append(row)
        if len(queues[size]) < recipe.batch:
            continue
        rows, queues[size] = queues[size], []
        decaying = step >= recipe.steps - recipe.decay_steps
        if rng.random() < (recipe.long_share_decay if decaying else recipe.long_share):
            held.extend(rows)
            size, shrink = LONG_CANVASES[rng.choice(len(LONG_CANVASES), p=(0.4, 0.3, 0.2, 0.1))]
            rows = [held.popleft() for _ in range(recipe.batch // shrink)]
        tokens = np.full((len(rows), size), words.EOS, np.int32)
        for i, (_, ids) in enumerate(rows):
            tokens[i, : len(ids)] = ids
        if step >= start:
            yield tokens, np.array([length for length, _ in rows], np.int32)
        step += 1


def draw_masks(
    key: jax.Array, tokens: jax.Array, prompt_length: jax.Array, block_share: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Which response positions are masked, bool [b, n], and each one's loss weight, f32 [b, n].

    LLaDA's objective in its low-variance form: l of the L response tokens, l uniform in 1..L and stratified over the
    batch, each weighing 1 / l (arXiv 2502.09992, appendix A). For ``block_share`` of the rows, positions of later blocks
    are masked before those of earlier ones, as block-wise decoding meets them.
    """
    b, n = tokens.shape
    position = jnp.arange(n)[None]
    response = position >= prompt_length[:, None]
    length = n - prompt_length
    count_key, order_key, mode_key, size_key, row_key = jax.random.split(key, 5)
    share = jax.random.permutation(row_key, (jax.random.uniform(count_key) + jnp.arange(b) / b) % 1.0)
    count = jnp.clip(jnp.ceil(share * length), 1, length)
    block = jnp.array([4, 8, 16, 32])[jax.random.randint(size_key, (b, 1), 0, 4)]
    blockwise = jax.random.bernoulli(mode_key, block_share, (b, 1))
    order = jax.random.uniform(order_key, (b, n)) - blockwise * ((position - prompt_length[:, None]) // block)
    rank = jnp.argsort(jnp.argsort(jnp.where(response, order, jnp.inf), axis=-1), axis=-1)
    masked = rank < count[:, None]
    return masked, masked / count[:, None]


def make_step(recipe: Recipe, graph: nnx.GraphDef) -> tuple[optax.GradientTransformation, Callable]:
    """The optimiser and the jitted, donating training step over (params, optimiser state, moving average)."""
    optimiser = muon(
        lambda step: recipe.muon_rate * recipe.rate(step),
        adam_learning_rate=lambda step: recipe.adam_rate * recipe.rate(step),
        adam_b2=0.98,
        weight_decay=recipe.weight_decay,
        adam_weight_decay=recipe.weight_decay,
        muon_weight_dimension_numbers=_muon_axes,
    )
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optimiser)

    def loss_fn(params, tokens, masked, weight, visible):
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = model.logits(model(jnp.where(masked, words.MASK, tokens), positions, visible))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return jnp.sum(losses * weight) / tokens.shape[0]

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, average, tokens, prompt_length, index):
        mask_key, hide_key = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), index))
        adapting = index >= recipe.adapt_from
        masked, weight = draw_masks(mask_key, tokens, prompt_length, jnp.where(adapting, recipe.block_masks, 0.0))
        response = jnp.arange(tokens.shape[1])[None] >= prompt_length[:, None]
        hidden = jax.random.bernoulli(hide_key, jnp.where(adapting, recipe.hide_share, 0.0), (tokens.shape[0], 1, 1))
        visible = ~(hidden & ~response[:, :, None] & response[:, None, :])
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, masked, weight, visible)
        updates, state = optimiser.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, jnp.maximum(1 - recipe.ema, 9 / (10 + index)))
        return params, state, average, loss

    return optimiser, step


def _muon_axes(params):
    """Matrices of the layers go to Muon, each of a fused pack on its own: orthogonalised together, the larger gradient of the
    values would drown those of queries and keys. Embedding, head and norms go to Adam."""
    axes = {
        "qkv": MuonDimensionNumbers((0,), (1, 3)),
        "out": MuonDimensionNumbers((0, 1), (2,)),
        "gate_up": MuonDimensionNumbers((0,), (2,)),
        "down": MuonDimensionNumbers((0,), (1,)),
    }
    name = lambda path: next((str(key.key) for key in reversed(path) if hasattr(key, "key")), "")  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, _: axes.get(name(path)), params)


def train(
    recipe: Recipe,
    *,
    on_progress: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
    on_checkpoint: Callable[[int, object], None] = lambda step, carry: None,
    resume: Callable[[object], tuple[int, object]] = lambda carry: (0, carry),
) -> Denoiser:
    """Train and return the moving-average model in float32.

    Args:
      recipe: hyper-parameters.
      on_progress: called every REPORT_EVERY steps with (steps done, mean loss since the last call, seconds since the start).
      on_checkpoint: called at the same moments with (steps done, (params, optimiser state, average)).
      resume: given the fresh carry, the (steps done, carry) to start from.
    """
    graph, params = nnx.split(Denoiser(SPEC, nnx.Rngs(recipe.seed)))
    params = nnx.to_pure_dict(params)
    optimiser, step = make_step(recipe, graph)
    done, carry = resume((params, optimiser.init(params), jax.tree.map(jnp.copy, params)))
    started, losses = time.perf_counter(), []
    for tokens, lengths in batches(recipe, done):
        if done >= recipe.steps:
            break
        *carry, loss = step(*carry, tokens, lengths, done)
        losses.append(loss)
        done += 1
        if done % REPORT_EVERY == 0 or done == recipe.steps:
            on_progress(done, float(jnp.mean(jnp.stack(losses))), time.perf_counter() - started)
            on_checkpoint(done, tuple(carry))
            losses = []
    return nnx.merge(graph, carry[2])
