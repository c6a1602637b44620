"""Whole decodes on one device by one choice of kernels and another: time by kind of pass, against reading the weights once."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax import decoders, generation
from polestar_jax.bench import measure
from polestar_jax.decode import engine
from polestar_jax.decode.policy import Decoder
from polestar_jax.models.denoiser import Denoiser

WHOLE = "whole loop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Passes of one kind in one decode, or all of them in the loop on the device.

    Attributes:
      method, how: the method, and the settings that are compared.
      kind: the plan's name, or WHOLE.
      passes: how many; seconds: of one, the median.
      weight_bytes: that one must read; None for the whole loop, whose passes differ.
      compile_seconds: 0 where the program was known.
    """

    method: str
    how: str
    kind: str
    passes: int
    seconds: float
    weight_bytes: int | None
    compile_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """A decode's rows and its tokens, i32 [b, G]."""

    rows: tuple[Row, ...]
    tokens: np.ndarray


def decoder_of(method: str, settings: dict[str, Any], *, gen: int, block: int) -> Decoder:
    """A method at its defaults but for these settings; a kernel that cannot be had is an error."""
    return decoders.METHODS[method].build(gen_length=gen, block_length=block, strict_kernels=True, **settings)


def by_kind(
    model: Denoiser,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    how: str,
    *,
    calls: int,
    repeats: int,
    on_progress: Callable[[str], None],
) -> Decoded:
    """Decode pass by pass, each kind of pass timed as :func:`polestar_jax.bench.measure.by_kind` does."""
    kinds, state = measure.by_kind(model, decoder, prompts, calls=calls, repeats=repeats, on_progress=on_progress)
    rows = tuple(
        Row(
            method=decoder.name,
            how=how,
            kind=kind.name,
            passes=kind.passes,
            seconds=kind.ms / 1e3,
            weight_bytes=kind.weight_bytes,
            compile_seconds=kind.compile_seconds,
        )
        for kind in kinds
    )
    return Decoded(rows=rows, tokens=np.asarray(state.generated))


def whole(model: Denoiser, decoder: Decoder, prompts: Sequence[Sequence[int]], how: str, *, repeats: int) -> Decoded:
    """Decode in the loop on the device, once to warm up; a pass takes the loop's time over the number of passes."""
    batch = [list(prompt) for prompt in prompts]
    warm = generation.run(model, decoder, batch)
    passes = int(warm.state.passes)
    seconds = statistics.median(generation.run(model, decoder, batch).seconds for _ in range(repeats))
    row = Row(
        method=decoder.name,
        how=how,
        kind=WHOLE,
        passes=passes,
        seconds=seconds / passes,
        weight_bytes=None,
        compile_seconds=warm.compile_seconds,
    )
    return Decoded(rows=(row,), tokens=np.asarray(warm.state.generated))


def read_bandwidth(model: Denoiser, *, repeats: int) -> float:
    """Bytes per second at which a plain sum over all weights reads them, calls included."""
    _, weights = engine.split(model)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    program = jax.jit(_summed).lower(weights).compile()
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        started = time.perf_counter()
        jax.block_until_ready(program(weights))
        times.append(time.perf_counter() - started)
    return total / statistics.median(times[1:])


def _summed(weights: Any) -> list[jax.Array]:
    return [jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(weights)]
