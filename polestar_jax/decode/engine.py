"""One decode step, and the two loops over it.

``decode`` runs a ``lax.while_loop`` on the device; ``stream`` calls the same jitted step from Python and yields after each
pass. Neither traverses the module in the loop: it is split once, and the weights enter as a plain pytree.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from polestar_jax.commit import at_least_one
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.sampling import TOKEN_NOISE, RowScores, score_rows
from polestar_jax.decode.state import NEAR_TIE, REFRESH_STEP, DecodeState, Pass, Scores
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


def bucket(length: int) -> int:
    """Prompt columns for a prompt of ``length`` tokens: multiples of 32 up to 256, of 128 above; one compile each."""
    multiple = 32 if length <= 256 else 128
    return max(1, -(-length // multiple)) * multiple


def init_state(
    model: Denoiser,
    decoder: Decoder,
    prompts: Sequence[int] | Sequence[Sequence[int]],
    *,
    seed: int = 0,
    sequence_ids: Sequence[int] | None = None,
    columns: int | None = None,
) -> DecodeState:
    """The state before the first pass.

    Args:
      model: gives the ids and the length limit.
      decoder: gives the generation length and the policies.
      prompts: token ids of one prompt, or of several of any lengths.
      seed: of the sampling noise.
      sequence_ids: what to fold into each sequence's key (default 0, 1, ...): a prompt with the same id samples the same
        tokens in whatever batch it is.
      columns: prompt columns; default the bucket of the longest prompt.

    Raises:
      InputError: an empty prompt, an id outside the vocabulary, a mask token in a prompt, or prompt and generation longer
        than the model was made for.
    """
    spec = model.spec
    if not isinstance(prompts, (Sequence, np.ndarray)) or isinstance(prompts, (str, bytes)):
        raise InputError(f"prompts must be token ids or a list of them, got {type(prompts).__name__}")
    batch = [prompts] if len(prompts) and isinstance(prompts[0], (int, np.integer)) else list(prompts)
    for prompt in batch or [[]]:
        check_prompt(prompt, spec, decoder.gen_length)
    check_seed(seed)
    longest = max(map(len, batch))
    columns = bucket(longest) if columns is None else columns
    if columns < longest:
        raise InputError(f"columns {columns} is not accepted: at least the longest prompt's {longest}")
    if sequence_ids is not None and len(sequence_ids) != len(batch):
        raise InputError(f"{len(sequence_ids)} sequence_ids for {len(batch)} prompts")
    tokens = np.full((len(batch), columns + decoder.gen_length), spec.mask_id, np.int32)
    tokens[:, :columns] = spec.eos_id
    for row, prompt in zip(tokens, batch, strict=True):
        row[columns - len(prompt) : columns] = prompt
    ids = np.asarray(range(len(batch)) if sequence_ids is None else sequence_ids, np.uint32)
    pad = np.array([columns - len(prompt) for prompt in batch], np.int32)
    state = _fresh(decoder, tokens, pad, np.uint32(seed), ids)
    return state.replace(cache=decoder.cache.init(spec, _guided(state, decoder, spec), model.dtype))


@functools.partial(jax.jit, static_argnums=0)
def _fresh(decoder: Decoder, tokens: jax.Array, pad: jax.Array, seed: jax.Array, ids: jax.Array) -> DecodeState:
    """The state of canvases nobody has worked on, without a cache."""
    b, gen_length = pad.shape[0], decoder.gen_length
    span = decoder.schedule.next(jnp.ones((b, gen_length), bool))
    zero = jnp.zeros(b, jnp.int32)
    return DecodeState(
        tokens=tokens,
        pad=pad,
        key=jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(ids),
        passes=jnp.int32(0),
        nfe=zero,
        full_forwards=zero,
        partial_forwards=zero,
        refreshes=zero,
        span_start=span.start,
        span_end=span.end,
        span_index=span.index,
        span_passes=zero,
        span_masks=span.end - span.start,
        committed=zero,
        near_ties=zero,
        reason=jnp.full((b, gen_length), -1, jnp.int8),
        committed_at=jnp.full((b, gen_length), -1, jnp.int32),
        done=jnp.zeros(b, bool),
        finite=jnp.ones(b, bool),
        commit=_rule(decoder).init(b, gen_length),
        trace=decoder.trace.init(decoder.max_passes, b, gen_length) if decoder.trace else None,
    )


def check_prompt(prompt: Sequence[int], spec: ModelSpec, gen_length: int) -> None:
    """Refuse what a gather on the device would silently clamp or a model was not made for."""
    check_ids(prompt, spec)
    ids = np.asarray(prompt)
    if (ids == spec.mask_id).any():
        raise InputError(f"prompt contains the mask token {spec.mask_id}; prompts must be decided")
    if len(ids) + gen_length > spec.max_length:
        raise InputError(
            f"prompt of {len(ids)} tokens and gen_length {gen_length} make {len(ids) + gen_length}, "
            f"more than the model's max_length {spec.max_length}"
        )


def check_ids(ids: Sequence[int], spec: ModelSpec) -> None:
    """Refuse anything but a non-empty list of ids of the vocabulary."""
    accepted = f"whole numbers in 0..{spec.vocab_size - 1}"
    if not isinstance(ids, (Sequence, np.ndarray)) or isinstance(ids, (str, bytes)):
        raise InputError(f"prompt ids must be a list of {accepted}, got {type(ids).__name__}")
    if not len(ids):
        raise InputError("prompt is empty; at least one token is needed")
    for token in ids:
        if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
            raise InputError(f"prompt id {token!r} is not accepted: {accepted}")
        if not 0 <= token < spec.vocab_size:
            raise InputError(f"prompt id {token} is outside the vocabulary 0..{spec.vocab_size - 1}")


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise InputError(f"seed {seed!r} is not accepted: a whole number in 0..{2**32 - 1}")


def step(model: Denoiser, decoder: Decoder, state: DecodeState) -> DecodeState:
    """One forward pass and its commits, for every unfinished sequence; a finished one is left as it is."""
    spec, active = model.spec, ~state.done
    result, scores = _forward(model, decoder, state)
    accept, reason, commit = _rule(decoder).select(scores, state)
    accept = accept & scores.eligible
    generated = jnp.where(accept, scores.token, state.generated)
    complete = active & ~jnp.any((generated == spec.mask_id) & state.in_span, axis=-1)
    # Without numbers to go by there is nothing to decide: the sequence stops and the caller is told.
    done = state.done | ~jnp.any(generated == spec.mask_id, axis=-1) | ~scores.finite
    if decoder.stop_at_eos:
        reached = jnp.arange(state.gen_length)[None] < state.span_end[:, None]
        ended = complete & jnp.any(jnp.isin(generated, jnp.array(spec.stop_ids)) & reached, axis=-1)
        generated = jnp.where(ended[:, None] & (generated == spec.mask_id), spec.eos_id, generated)
        done = done | ended
    count = active.astype(jnp.int32)
    new = state.replace(
        tokens=lax.dynamic_update_slice(state.tokens, generated, (0, state.prompt_columns)),
        passes=state.passes + 1,
        nfe=state.nfe + count,
        full_forwards=state.full_forwards + (active & result.full),
        partial_forwards=state.partial_forwards + (active & ~result.full),
        refreshes=state.refreshes + (active & (result.kind == REFRESH_STEP)),
        span_passes=state.span_passes + count,
        committed=jnp.sum(accept & state.in_span, axis=-1),
        near_ties=state.near_ties + jnp.sum(accept & scores.near_tie, axis=-1),
        reason=jnp.where(accept, reason, state.reason),
        committed_at=jnp.where(accept, state.nfe[:, None], state.committed_at),
        done=done,
        finite=state.finite & (scores.finite | state.done),
        cache=result.cache,
        commit=commit,
        trace=_recorded(decoder, state, result, scores, accept, generated),
    )
    return _entered(decoder, new, complete & ~done, generated == spec.mask_id)


def _forward(model: Denoiser, decoder: Decoder, state: DecodeState) -> tuple[Pass, Scores]:
    """The cache policy's pass, without its guidance half, and the scores of what it computed."""
    spec, b = model.spec, state.done.shape[0]
    result = decoder.cache.forward(model, decoder.schedule, _guided(state, decoder, spec))
    logits = model.logits(result.rows)
    if decoder.guidance:
        conditional, unconditional = jnp.split(logits, 2)
        logits = unconditional + (decoder.guidance + 1) * (conditional - unconditional)
        result = result._replace(targets=result.targets[:b], kind=result.kind[:b], full=result.full[:b])
    rows = score_rows(logits, decoder.sampling, spec, state.pass_key(TOKEN_NOISE))
    return result, _by_position(rows, result.targets, state, spec.mask_id)


def _entered(decoder: Decoder, state: DecodeState, move: jax.Array, undecided: jax.Array) -> DecodeState:
    """The state with the sequences ``move`` bool [b] on the next span that the schedule gives."""
    span = decoder.schedule.next(undecided)
    moved = lambda new, old: jnp.where(move, new, old)  # noqa: E731
    state = state.replace(
        span_start=moved(span.start, state.span_start),
        span_end=moved(span.end, state.span_end),
        span_index=moved(span.index, state.span_index),
        span_passes=moved(0, state.span_passes),
    )
    return state.replace(span_masks=moved(jnp.sum(undecided & state.in_span, axis=-1), state.span_masks))


def _recorded(
    decoder: Decoder, state: DecodeState, result: Pass, scores: Scores, accept: jax.Array, generated: jax.Array
) -> Any:
    """The trace with this pass in it."""
    if not decoder.trace:
        return state.trace
    values = {
        "tokens": generated,
        "confidence": jnp.where(scores.eligible, scores.confidence, jnp.nan),
        "committed": accept,
        "block": state.span_index,
        "kind": result.kind,
    }
    return decoder.trace.record(state.trace, state.nfe, ~state.done, values | result.record)


def decode(model: Denoiser, decoder: Decoder, state: DecodeState) -> DecodeState:
    """Run to the end on the device; ``state`` is donated. Jitted, and may be called inside another jit."""
    graph, weights = split(model)
    return _decode(graph, weights, decoder, state)


def steps(model: Denoiser, decoder: Decoder, state: DecodeState) -> Iterator[DecodeState]:
    """Run pass by pass from Python, yielding the state after each.

    The cache is donated from pass to pass, so the yielded states carry ``cache=None``; everything else stays valid.
    """
    graph, weights = split(model)
    cache, state = state.cache, state.replace(cache=None)
    run, _ = _compile(_step, graph, weights, decoder, state, cache)
    while not bool(np.all(state.done)) and int(state.passes) < decoder.max_passes:
        state, cache = run(weights, state, cache)
        yield state


def compile_decode(model: Denoiser, decoder: Decoder, state: DecodeState) -> tuple[Callable, float]:
    """The compiled loop for states of this shape, as a function of (weights, state), and the seconds it took (0 if known)."""
    return _compile(_decode, *split(model), decoder, state)


def compile_step(model: Denoiser, decoder: Decoder, state: DecodeState) -> float:
    """Compile the step that ``steps`` runs on states of this shape; the seconds it took (0 if known)."""
    return _compile(_step, *split(model), decoder, state.replace(cache=None), state.cache)[1]


def _compile(program: Any, graph: nnx.GraphDef, weights: Any, decoder: Decoder, *states: Any) -> tuple[Callable, float]:
    signature = (program, graph, decoder, jax.tree.structure(states))
    signature += tuple((x.shape, x.dtype) for x in jax.tree.leaves((weights, states)))
    if signature in _compiled:
        return _compiled[signature], 0.0
    started = time.perf_counter()
    _compiled[signature] = program.lower(graph, weights, decoder, *states).compile()
    return _compiled[signature], time.perf_counter() - started


_compiled: dict[Any, Callable] = {}


def split(model: Denoiser) -> tuple[nnx.GraphDef, Any]:
    """(static structure, weights as a pytree); once a decode, never in the loop."""
    return nnx.split(model)


@functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=(3,))
def _decode(graph: nnx.GraphDef, weights: Any, decoder: Decoder, state: DecodeState) -> DecodeState:
    model = nnx.merge(graph, weights)
    with precision(model.dtype):
        return lax.while_loop(
            lambda s: jnp.any(~s.done) & (s.passes < decoder.max_passes),
            lambda s: step(model, decoder, s),
            state,
        )


@functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=(4,))
def _step(
    graph: nnx.GraphDef, weights: Any, decoder: Decoder, state: DecodeState, cache: Any
) -> tuple[DecodeState, Any]:
    model = nnx.merge(graph, weights)
    with precision(model.dtype):
        state = step(model, decoder, state.replace(cache=cache))
    return state.replace(cache=None), state.cache


def precision(dtype: jnp.dtype) -> contextlib.AbstractContextManager:
    """Strict float32: NVIDIA GPUs would otherwise multiply float32 matrices in TF32, off by about 1e-2."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


def _rule(decoder: Decoder):
    """The commit rule with the progress guarantee around it."""
    return decoder.commit if decoder.commit.may_stall else at_least_one(decoder.commit)


def _guided(state: DecodeState, decoder: Decoder, spec: ModelSpec) -> DecodeState:
    """What the forward pass sees: with guidance, every sequence twice, the second time with its prompt masked."""
    if not decoder.guidance:
        return state
    column = jnp.arange(state.tokens.shape[1])[None]
    prompt = (column >= state.pad[:, None]) & (column < state.prompt_columns)
    masked = jnp.where(prompt, spec.mask_id, state.tokens)
    cache, trace = state.cache, state.trace
    twice = jax.tree.map(
        lambda x: jnp.concatenate([x, x]) if x.ndim else x, state.replace(cache=(), trace=None, commit=())
    )
    return twice.replace(tokens=jnp.concatenate([state.tokens, masked]), cache=cache, trace=trace)


def _by_position(rows: RowScores, targets: jax.Array, state: DecodeState, mask_id: int) -> Scores:
    """Scatter row scores [b, r] to generated positions [b, G]."""
    b, g = state.reason.shape
    batch = jnp.arange(b)[:, None]
    put = lambda value, fill: jnp.full((b, g), fill, value.dtype).at[batch, targets].set(value, mode="drop")  # noqa: E731
    seen = put(jnp.ones_like(targets, bool), False)
    last = lambda value: jnp.where(rows.deferred, -jnp.inf, value)  # noqa: E731
    return Scores(
        token=put(rows.token, 0),
        confidence=put(last(rows.confidence), -jnp.inf),
        margin=put(last(rows.margin), -jnp.inf),
        neg_entropy=put(last(rows.neg_entropy), -jnp.inf),
        eligible=seen & (state.generated == mask_id) & state.in_span & ~state.done[:, None],
        near_tie=put(rows.margin < NEAR_TIE, False),
        finite=~jnp.any(jnp.isnan(rows.confidence) & (targets < g), axis=-1),
    )
