"""Prompts in, answers out: bucketing, batching, accounting and traces around the decode loop."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from polestar_jax.decode import engine
from polestar_jax.decode import prompts as check
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.state import REASONS, DecodeState
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError, RunError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec
from polestar_jax.tokenization import Tokenizer

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What an answer cost. Prompt tokens are never counted; loading and compiling are no part of ``seconds``.

    Attributes:
      nfe: forward passes, each counted once whatever rows it computed.
      full_forwards, partial_forwards: passes over the whole canvas, and over some of its rows.
      refreshes: passes that refreshed a cache.
      rows: rows that the passes computed, a layer (the mean over layers where they differ).
      tokens_non_eos: generated tokens that are neither end of text nor end of turn.
      tpf, tps: those tokens per forward pass, and per second.
      tpf_all, tps_all: the same for all generated positions, end-of-text filler included.
      seconds: wall time of the decode loop; for a batch, of the whole batch.
      compile_seconds: what compiling took if this answer caused it, else 0.
      commits: how many positions were committed for each reason.
      near_ties: share of positions committed while the two best tokens were within 0.01 of each other in probability;
        those may differ between devices, dtypes and kernels.
      repetition: share of the answer's runs of four tokens that occurred in it before; near 1 for text that loops.
    """

    nfe: int
    full_forwards: int
    partial_forwards: int
    refreshes: int
    rows: float
    tokens_non_eos: int
    tpf: float
    tps: float
    tpf_all: float
    tps_all: float
    seconds: float
    compile_seconds: float
    commits: dict[str, int]
    near_ties: float
    repetition: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer: text cut at the first end of text (None without a tokenizer), all G generated ids, costs and trace."""

    text: str | None
    prompt_ids: list[int]
    tokens: list[int]
    stats: Stats
    trace: dict[str, np.ndarray] | None = None


def generate(
    model: Denoiser, tokenizer: Tokenizer | None, prompts: Sequence[Prompt], decoder: Decoder, **options: Any
) -> list[Answer]:
    """Answer prompts, in order: the list of what :func:`iterate` yields, with its options and errors."""
    return list(iterate(model, tokenizer, prompts, decoder, **options))


def iterate(
    model: Denoiser,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    decoder: Decoder,
    *,
    raw: bool = False,
    batch_size: int = 1,
    seed: int = 0,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Answer]:
    """Answer prompts, yielding each answer as its batch ends.

    Args:
      model, tokenizer: from ``load``; the tokenizer may be None when all prompts are ids.
      prompts: texts, id lists, or lists of chat messages ({"role": ..., "content": ...}).
      decoder: the method.
      raw: tokenise texts as they are, without the chat template.
      batch_size: prompts decoded together; it changes no token in float32.
      seed: of the sampling noise; prompt i always draws the same numbers, whatever the batch.
      on_batch: called with (prompts done, prompts in all) after each batch.

    Raises:
      InputError: a prompt that cannot be used, named by its place, before anything is decoded.
      RunError: undecided positions left at the end, or logits that are not finite.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise InputError(f"batch_size {batch_size!r} is not accepted: a whole number >= 1")
    check.check_seed(seed)
    decoder = decoder.for_model(model.spec, tokenizer)
    ids = all_prompt_ids(prompts, tokenizer, model.spec, decoder.gen_length, raw=raw)
    for first in range(0, len(ids), batch_size):
        batch = ids[first : first + batch_size]
        # A short last batch is filled up, so that it runs the program of the others.
        short = batch_size - len(batch) if first else 0
        states = run(model, decoder, batch + batch[-1:] * short, seed=seed, first=first)
        yield from answers(states, batch, model, decoder, tokenizer)
        on_batch(first + len(batch), len(ids))


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished batch on the host, the seconds its loop took, and what compiling took."""

    state: DecodeState
    seconds: float
    compile_seconds: float


def run(model: Denoiser, decoder: Decoder, batch: list[list[int]], *, seed: int = 0, first: int = 0) -> Finished:
    """Decode one batch of prompt ids; ``first`` is the place of its first prompt among all (it seeds the noise)."""
    state = engine.init_state(model, decoder, batch, seed=seed, sequence_ids=range(first, first + len(batch)))
    loop, compile_seconds = engine.compile_decode(model, decoder, state)
    _, weights = engine.split(model)
    jax.block_until_ready(state)
    started = time.perf_counter()
    state = jax.block_until_ready(loop(weights, state))
    return Finished(state, time.perf_counter() - started, compile_seconds)


def answers(
    finished: Finished, batch: list[list[int]], model: Denoiser, decoder: Decoder, tokenizer: Tokenizer | None
) -> Iterator[Answer]:
    """The answers of the first ``len(batch)`` sequences of a finished batch."""
    state = finished.state
    tokens, reasons, nfe, full, partial, refreshes, rows, near_ties = jax.device_get(
        (
            state.generated,
            state.reason,
            state.nfe,
            state.full_forwards,
            state.partial_forwards,
            state.refreshes,
            state.rows,
            state.near_ties,
        )
    )
    if not bool(np.all(state.finite[: len(batch)])):
        raise RunError("the model's logits are not finite; its weights or a setting (guidance, dtype) overflow")
    left = int((tokens[: len(batch)] == model.spec.mask_id).sum())
    if left:
        why = (
            "the commit rule or the schedule left them undecided"
            if decoder.sampling.exclude_mask
            else "the model proposed it; exclude_mask=true bars it"
        )
        raise RunError(
            f"{left} of {tokens[: len(batch)].size} generated positions hold the mask token {model.spec.mask_id} "
            f"after {int(state.passes)} passes: {why}"
        )
    for i, prompt in enumerate(batch):
        stats = count(
            tokens[i], reasons[i], model.spec, nfe=int(nfe[i]), full_forwards=int(full[i]), partial_forwards=int(partial[i]),
            refreshes=int(refreshes[i]), rows=float(rows[i]), near_ties=int(near_ties[i]), seconds=finished.seconds,
            compile_seconds=finished.compile_seconds,
        )  # fmt: skip
        ids = tokens[i].tolist()
        yield Answer(
            text=tokenizer.text(ids, model.spec) if tokenizer else None,
            prompt_ids=[int(token) for token in prompt],
            tokens=ids,
            stats=stats,
            trace=trace_arrays(state, i, model.spec, decoder) if decoder.trace else None,
        )


def count(
    tokens: np.ndarray, reasons: np.ndarray, spec: ModelSpec, *, nfe: int, full_forwards: int, partial_forwards: int,
    refreshes: int, rows: float, near_ties: int, seconds: float, compile_seconds: float,
) -> Stats:  # fmt: skip
    """Accounting of one answer from its generated tokens [G] and commit reasons [G]."""
    kept = tokens[~np.isin(tokens, spec.stop_ids)].tolist()
    real = len(kept)
    runs = list(zip(kept, kept[1:], kept[2:], kept[3:], strict=False))
    per = lambda amount, whole: amount / whole if whole else 0.0  # noqa: E731
    return Stats(
        nfe=nfe, full_forwards=full_forwards, partial_forwards=partial_forwards, refreshes=refreshes, rows=rows,
        tokens_non_eos=real,
        tpf=per(real, nfe), tps=per(real, seconds), tpf_all=per(len(tokens), nfe), tps_all=per(len(tokens), seconds),
        seconds=seconds, compile_seconds=compile_seconds,
        commits={name: int((reasons == code).sum()) for code, name in enumerate(REASONS)},
        near_ties=per(near_ties, len(tokens)), repetition=per(len(runs) - len(set(runs)), len(runs)),
    )  # fmt: skip


def trace_arrays(state: DecodeState, i: int, spec: ModelSpec, decoder: Decoder) -> dict[str, np.ndarray]:
    """The trace of sequence ``i``: the recorded fields cut to its passes T, and why and when each position was committed.

    Fields over canvas columns lose the padding. Fields of cluster-based methods are present, empty, for the others: they
    keep one reader for all.
    """
    passes = int(state.nfe[i])
    arrays = {name: np.asarray(buffer[:passes, i]) for name, buffer in state.trace.items()}
    pad = int(state.pad[i])
    arrays |= {name: arrays[name][..., pad:] for name in ("token_selected", "labels") if name in arrays}
    length = state.tokens.shape[1] - pad
    none = (passes, spec.n_layers, 0)
    empty = {
        "cluster_drift": np.full(none, np.nan, np.float32),
        "cluster_selected": np.zeros(none, bool),
        "token_selected": np.zeros((passes, spec.n_layers, length), bool),
        "labels": np.full((passes, spec.n_layers, length), -1, np.int32),
    }
    return (
        empty
        | arrays
        | {
            "reason": np.asarray(state.reason[i]),
            "step": np.asarray(state.committed_at[i]),
            "settings": np.array(json.dumps({"method": decoder.name} | decoder.settings())),
        }
    )


def all_prompt_ids(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, spec: ModelSpec, gen_length: int, *, raw: bool
) -> list[list[int]]:
    """Token ids of all prompts, each checked; InputError names the place of the first that cannot be used."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, (Sequence, np.ndarray)):
        raise InputError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
    ids = []
    for place, prompt in enumerate(prompts):
        try:
            ids.append(prompt_ids(prompt, tokenizer, raw=raw))
            check.check_prompt(ids[-1], spec, gen_length)
        except InputError as error:
            where = f"prompt {place + 1} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise InputError(f"{where}{error}") from None
    return ids


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, *, raw: bool = False) -> list[int]:
    """Token ids of a prompt: a text (chat template unless ``raw``), chat messages, or ids as they are."""
    if isinstance(prompt, bytes) or not isinstance(prompt, (str, Sequence, np.ndarray)):
        raise InputError(f"a prompt is a text, a list of token ids or a list of messages, got {type(prompt).__name__}")
    if not isinstance(prompt, str) and not any(isinstance(part, dict) for part in prompt):
        return list(prompt)
    if isinstance(prompt, str) and not prompt.strip():
        raise InputError("prompt is empty")
    if tokenizer is None:
        raise InputError("the model's directory has no tokenizer files; give token ids (--prompt-ids)")
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt, raw=raw)
    return tokenizer.encode_chat(list(prompt))


def stream(
    model: Denoiser,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    decoder: Decoder,
    *,
    raw: bool = False,
    seed: int = 0,
    trace: Trace | None = None,
) -> Iterator[DecodeState]:
    """Decode one batch pass by pass, yielding the state after each: the same step as ``decode``, the same tokens.

    Args:
      trace: record these fields in the states' ``trace``; default the decoder's.
    """
    decoder = decoder.for_model(model.spec, tokenizer)
    decoder = decoder.replace(trace=trace) if trace else decoder
    ids = all_prompt_ids(prompts, tokenizer, model.spec, decoder.gen_length, raw=raw)
    yield from engine.steps(model, decoder, engine.init_state(model, decoder, ids, seed=seed))


def logits(model: Denoiser, ids: Sequence[int]) -> np.ndarray:
    """Logits of one full forward over ``ids`` [S]: float32 [S, V], row i as the model gives it (no logit shift)."""
    spec = model.spec
    check.check_ids(ids, spec)
    array = np.asarray(ids)
    if array.size > spec.max_length:
        raise InputError(f"{array.size} ids are more than the model's max_length {spec.max_length}")
    columns = engine.bucket(array.size)
    padded = np.full((1, columns), spec.eos_id, np.int32)
    padded[0, : array.size] = array
    graph, weights = engine.split(model)
    return np.asarray(_full_logits(graph, weights, padded, array.size))[0, : array.size]


@functools.partial(jax.jit, static_argnums=0)
def _full_logits(graph: nnx.GraphDef, weights: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    model = nnx.merge(graph, weights)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with engine.precision(model.dtype):
        return model.logits(model(tokens, positions, positions < length))
