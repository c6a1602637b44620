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

from polestar_jax.commit.rule import at_least_one
from polestar_jax.decode.policy import Decoder, Span
from polestar_jax.decode.prompts import check_prompt, check_seed
from polestar_jax.decode.scoring import doubled, forward, guided
from polestar_jax.decode.state import REFRESH_STEP, DecodeState, Pass, Scores, kept
from polestar_jax.decode.surroundings import kernels_of, settled
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
    decoder = decoder.for_model(spec)
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
    state = _fresh(decoder, spec.n_layers, tokens, pad, np.uint32(seed), ids)
    return state.replace(cache=_empty_cache(decoder, spec, jnp.dtype(model.dtype), state))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_cache(decoder: Decoder, spec: ModelSpec, dtype: jnp.dtype, state: DecodeState) -> Any:
    """The cache before the first pass, in one program: one by one, a deep model's arrays take longer than a short answer."""
    return decoder.cache.init(spec, decoder.wanted, guided(state, decoder, spec), dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fresh(
    decoder: Decoder, layers: int, tokens: jax.Array, pad: jax.Array, seed: jax.Array, ids: jax.Array
) -> DecodeState:
    """The state of canvases nobody has worked on, without a cache."""
    b, gen_length = pad.shape[0], decoder.gen_length
    open_ = jnp.broadcast_to(pad[:, None] >= 0, (b, gen_length))  # all true, yet no constant to fold
    span = _span(decoder, open_, jnp.full(b, -1, jnp.int32))
    zero = jnp.zeros(b, jnp.int32)
    trace = None
    if decoder.trace:
        sizes = dict(layers=layers, clusters=getattr(decoder.cache, "clusters", 0), columns=tokens.shape[1])
        trace = decoder.trace.init(decoder.max_passes, b, gen_length, **sizes)
    return DecodeState(
        tokens=tokens,
        pad=pad,
        key=jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(ids),
        passes=jnp.int32(0),
        nfe=zero,
        full_forwards=zero,
        partial_forwards=zero,
        refreshes=zero,
        rows=jnp.zeros(b, jnp.float32),
        span_start=span.start,
        span_end=span.end,
        span_index=span.index,
        span_passes=zero,
        span_masks=span.end - span.start,
        committed=zero,
        near_ties=zero,
        reason=jnp.full((b, gen_length), -1, jnp.int8),
        committed_at=jnp.full((b, gen_length), -1, jnp.int32),
        active=jnp.ones(b, bool),
        done=jnp.zeros(b, bool),
        finite=jnp.ones(b, bool),
        schedule=decoder.schedule.init(b, gen_length),
        commit=_rule(decoder).init(b, gen_length),
        trace=trace,
    )


def step(model: Denoiser, decoder: Decoder, state: DecodeState, plan: int | None = None) -> DecodeState:
    """One forward pass and its commits, by the plan of this index in ``decoder.cache.plans`` (default: the one that is needed
    first) and for every unfinished sequence that it serves; the others are left as they are."""
    decoder = decoder.for_model(model.spec)
    with kernels_of(decoder):
        return _advanced(model, decoder, state, plan)


def _advanced(model: Denoiser, decoder: Decoder, state: DecodeState, plan: int | None) -> DecodeState:
    plans, spec = decoder.cache.plans, model.spec
    if plan is None and len(plans) > 1:
        runs = [functools.partial(_advanced, model, decoder, plan=i) for i in range(len(plans))]
        return lax.switch(needed(decoder, state, spec), runs, state)
    plan = plan or 0
    state = state.replace(active=~state.done & _served(decoder, state, plan, spec))
    active = state.active
    result, scores = forward(model, decoder, state, plans[plan].name)
    state, scores = _fitted(decoder, state, scores)
    accept, reason, commit = _rule(decoder).select(scores, state)
    accept = accept & (scores.eligible | scores.ahead)
    generated = jnp.where(accept, scores.token, state.generated)
    complete = active & ~jnp.any((generated == spec.mask_id) & state.in_span, axis=-1)
    # Without numbers to go by there is nothing to decide: the sequence stops and the caller is told.
    done = state.done | (active & (~jnp.any(generated == spec.mask_id, axis=-1) | ~scores.finite))
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
        rows=state.rows + jnp.where(active, result.computed, 0),
        span_passes=state.span_passes + count,
        committed=jnp.where(active, jnp.sum(accept & state.in_span, axis=-1), state.committed),
        near_ties=state.near_ties + jnp.sum(accept & scores.near_tie, axis=-1),
        reason=jnp.where(accept, reason, state.reason),
        committed_at=jnp.where(accept, state.nfe[:, None], state.committed_at),
        done=done,
        finite=state.finite & (scores.finite | ~active),
        cache=_observed(decoder, state, result, scores, accept, spec),
        commit=kept(active, commit, state.commit),
        trace=_recorded(decoder, state, result, scores, accept, generated, commit),
    )
    return _entered(decoder, new, complete & ~done, generated == spec.mask_id)


def needed(decoder: Decoder, state: DecodeState, spec: ModelSpec) -> jax.Array:
    """The index of the plan to run next, i32 []: the first that an unfinished sequence wants."""
    count = len(decoder.cache.plans)
    if count == 1:
        return jnp.int32(0)
    return jnp.minimum(jnp.min(jnp.where(state.done, count, decoder.cache.wants(spec, state))), count - 1)


def _served(decoder: Decoder, state: DecodeState, plan: int, spec: ModelSpec) -> jax.Array:
    """Which sequences a pass by this plan serves, bool [b]."""
    plans = decoder.cache.plans
    if len(plans) == 1:
        return jnp.ones_like(state.done)
    served = [other.name in (plans[plan].name, *plans[plan].also) for other in plans]
    return jnp.array(served)[decoder.cache.wants(spec, state)]


def _fitted(decoder: Decoder, state: DecodeState, scores: Scores) -> tuple[DecodeState, Scores]:
    """The state with its spans as the schedule sees them now that they have been scored, and the scores for these."""
    end, own = decoder.schedule.fit(scores, state)
    end = jnp.where(state.active, jnp.minimum(end, state.span_start + decoder.schedule.capacity), state.span_end)
    state = state.replace(span_end=end, schedule=kept(state.active, own, state.schedule))
    scores = scores.within(state)
    masks = jnp.sum(scores.eligible, axis=-1)
    return state.replace(span_masks=jnp.where(state.active & state.entering, masks, state.span_masks)), scores


def _observed(
    decoder: Decoder, state: DecodeState, result: Pass, scores: Scores, accept: jax.Array, spec: ModelSpec
) -> Any:
    """The cache policy's pytree, once it knows what is committed."""
    seen = doubled(decoder, (scores, accept))
    return decoder.cache.observe(result.cache, *seen, guided(state, decoder, spec))


def _span(decoder: Decoder, undecided: jax.Array, last: jax.Array) -> Span:
    """The schedule's next span, cut to its capacity: what lies beyond it would never be scored."""
    span = decoder.schedule.next(undecided, last)
    return span._replace(end=jnp.minimum(span.end, span.start + decoder.schedule.capacity))


def _entered(decoder: Decoder, state: DecodeState, move: jax.Array, undecided: jax.Array) -> DecodeState:
    """The state with the sequences ``move`` bool [b] on the next span that the schedule gives."""
    span = _span(decoder, undecided, state.span_index)
    moved = lambda new, old: jnp.where(move, new, old)  # noqa: E731
    state = state.replace(
        span_start=moved(span.start, state.span_start),
        span_end=moved(span.end, state.span_end),
        span_index=moved(span.index, state.span_index),
        span_passes=moved(0, state.span_passes),
    )
    return state.replace(span_masks=moved(jnp.sum(undecided & state.in_span, axis=-1), state.span_masks))


def _recorded(
    decoder: Decoder,
    state: DecodeState,
    result: Pass,
    scores: Scores,
    accept: jax.Array,
    generated: jax.Array,
    commit: Any,
) -> Any:
    """The trace with this pass in it."""
    if not decoder.trace:
        return state.trace
    values = {
        "tokens": generated,
        "confidence": jnp.where(scores.eligible | scores.ahead, scores.confidence, jnp.nan),
        "committed": accept,
        "block": state.span_index,
        "kind": result.kind,
    }
    if scores.drift is not None:
        values["drift"] = scores.drift
    values |= result.record | _rule(decoder).recorded(commit)
    return decoder.trace.record(state.trace, state.nfe, state.active, values)


def decode(model: Denoiser, decoder: Decoder, state: DecodeState) -> DecodeState:
    """Run to the end on the device; ``state`` is donated. Jitted, and may be called inside another jit."""
    decoder, state = settled(decoder.for_model(model.spec), state)
    graph, weights = split(model)
    return _decode(graph, weights, decoder, state)


def steps(model: Denoiser, decoder: Decoder, state: DecodeState) -> Iterator[DecodeState]:
    """Run pass by pass from Python, yielding the state after each.

    The cache is donated from pass to pass, so the yielded states carry ``cache=None``; everything else stays valid.
    """
    decoder, state = settled(decoder.for_model(model.spec), state)
    graph, weights = split(model)
    bound = decoder.max_passes * state.done.shape[0]
    while not bool(np.all(state.done)) and int(state.passes) < bound:
        plan = int(_needed(decoder, state, model.spec)) if len(decoder.cache.plans) > 1 else 0
        cache, state = state.cache, state.replace(cache=None)
        run, _ = _compile(_step, graph, weights, decoder, state, cache, plan=plan)
        state, cache = run(weights, state, cache)
        yield state
        state = state.replace(cache=cache)


def compile_decode(model: Denoiser, decoder: Decoder, state: DecodeState) -> tuple[Callable, float]:
    """The compiled loop for states of this shape, as a function of (weights, state), and the seconds it took (0 if known)."""
    decoder, state = settled(decoder.for_model(model.spec), state)
    return _compile(_decode, *split(model), decoder, state)


def compile_step(model: Denoiser, decoder: Decoder, state: DecodeState) -> float:
    """Compile the passes that ``steps`` runs on states of this shape; the seconds it took (0 if known)."""
    decoder, state = settled(decoder.for_model(model.spec), state)
    graph, weights = split(model)
    states = state.replace(cache=None), state.cache
    plans = range(len(decoder.cache.plans))
    return sum(_compile(_step, graph, weights, decoder, *states, plan=plan)[1] for plan in plans)


def _compile(
    program: Any, graph: nnx.GraphDef, weights: Any, decoder: Decoder, *states: Any, **static: int
) -> tuple[Callable, float]:
    signature = (program, graph, decoder, jax.tree.structure(states), *static.values())
    signature += tuple((x.shape, x.dtype) for x in jax.tree.leaves((weights, states)))
    if signature in _compiled:
        return _compiled[signature], 0.0
    started = time.perf_counter()
    while len(_compiled) >= MAX_PROGRAMS:
        del _compiled[next(iter(_compiled))]
    _compiled[signature] = program.lower(graph, weights, decoder, *states, **static).compile()
    return _compiled[signature], time.perf_counter() - started


_compiled: dict[Any, Callable] = {}
MAX_PROGRAMS = 16  # the oldest goes first: on a CPU each holds about a thousand of the 65,530 memory maps of a process


def forget_programs() -> None:
    """Drop every compiled program that is kept for later calls, here and by jax: on a CPU a process that keeps those of some
    thirty decoders runs out of memory maps."""
    _compiled.clear()
    jax.clear_caches()


def split(model: Denoiser) -> tuple[nnx.GraphDef, Any]:
    """(static structure, weights as a pytree); once a decode, never in the loop."""
    return nnx.split(model)


@functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=(3,))
def _decode(graph: nnx.GraphDef, weights: Any, decoder: Decoder, state: DecodeState) -> DecodeState:
    model = nnx.merge(graph, weights)
    plans = range(len(decoder.cache.plans))
    bound = decoder.max_passes * state.done.shape[0]
    going = lambda s: jnp.any(~s.done) & (s.passes < bound)  # noqa: E731

    def repeated(plan: int, state: DecodeState) -> DecodeState:
        # A loop of its own for each plan, where a conditional would copy the caches that its branches return.
        return lax.while_loop(
            lambda s: going(s) & (needed(decoder, s, model.spec) == plan),
            lambda s: step(model, decoder, s, plan),
            state,
        )

    with precision(model.dtype):
        if len(plans) == 1:
            return lax.while_loop(going, lambda s: step(model, decoder, s), state)
        return lax.while_loop(going, lambda s: functools.reduce(lambda s, plan: repeated(plan, s), plans, s), state)


@functools.partial(jax.jit, static_argnums=(0, 2), static_argnames="plan", donate_argnums=(4,))
def _step(
    graph: nnx.GraphDef, weights: Any, decoder: Decoder, state: DecodeState, cache: Any, *, plan: int
) -> tuple[DecodeState, Any]:
    model = nnx.merge(graph, weights)
    with precision(model.dtype):
        state = step(model, decoder, state.replace(cache=cache), plan)
    return state.replace(cache=None), state.cache


_needed = jax.jit(needed, static_argnums=(0, 2))


def precision(dtype: jnp.dtype) -> contextlib.AbstractContextManager:
    """Strict float32: NVIDIA GPUs would otherwise multiply float32 matrices in TF32, off by about 1e-2."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


def _rule(decoder: Decoder):
    """The commit rule with the progress guarantee around it."""
    return decoder.commit if decoder.commit.may_stall else at_least_one(decoder.commit)
