"""Measuring methods side by side: whole decodes, and single passes of each kind beside their bare products.

Everything is measured in rounds, each method's turn once a round, so that a machine that gets slower or faster does so for all
of them; what is reported is the median, and how far the rounds are apart. How much faster one method is than another is told by
the rounds' ratios. Compiling and one warm-up are no part of it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polestar_jax import generation
from polestar_jax.bench.products import compile_products, rows_in
from polestar_jax.bench.rows import Rows, count_rows, weight_bytes
from polestar_jax.decode import engine
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.state import DecodeState
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser

PASSES_A_ROUND = 3  # a pass is short beside a decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Passes of one kind: those of one plan of the cache policy.

    Attributes:
      name: the plan's.
      passes: how many there were in the decode.
      compile_seconds: of its own program (0 where it was known already).
      seconds, bare_seconds: times of a pass, and of its products with the weights alone, each called from Python, which for
        small models is most of it. No bare ones where only passes were asked for.
      rows: what goes through the weights.
      weight_bytes: bytes of weights that a pass must read at least.
      accessed_bytes: bytes that the operations of the compiled pass read and write, by the compiler's own count, which knows
        nothing of caches and counts the body of a loop once; None where it gives none.
    """

    name: str
    passes: int
    compile_seconds: float
    seconds: tuple[float, ...]
    bare_seconds: tuple[float, ...]
    rows: Rows
    weight_bytes: int
    accessed_bytes: int | None

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    @property
    def bare_ms(self) -> float:
        return 1e3 * statistics.median(self.bare_seconds)

    @property
    def overhead_share(self) -> float:
        """Share of a pass's time beyond that of its products; below 0 only where noise is larger than the rest."""
        return 1 - self.bare_ms / self.ms

    @property
    def weight_bytes_per_second(self) -> float:
        return 1e3 * self.weight_bytes / self.ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One run's decode of one batch.

    Attributes:
      run: its key, such as ``polestar[alpha=5]``.
      decoder: the method.
      compile_seconds: of the whole loop (0 where it was known already).
      seconds: wall times of the loop.
      passes: of the loop; ``nfe``: summed over the sequences, the same for a batch of one.
      tokens, tokens_non_eos: generated, all and those that are neither end of text nor end of turn.
      peak_bytes: weights, state and temporaries of the loop as the compiler lays them out; None where it does not tell.
      kinds: the kinds of passes that occurred.
    """

    run: str
    decoder: Decoder
    compile_seconds: float
    seconds: tuple[float, ...]
    passes: int
    nfe: int
    tokens: int
    tokens_non_eos: int
    peak_bytes: int | None
    kinds: tuple[Kind, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tps_all(self) -> float:
        return self.tokens / self.median_seconds

    @property
    def ms(self) -> float:
        """Milliseconds of the loop per pass."""
        return 1e3 * self.median_seconds / self.passes

    @property
    def bare_ms(self) -> float:
        """Milliseconds per pass that the products alone take."""
        return sum(kind.passes * kind.bare_ms for kind in self.kinds) / sum(kind.passes for kind in self.kinds)

    @property
    def overhead_share(self) -> float:
        """Share of the loop's time beyond that of its products."""
        return 1 - self.bare_ms / self.ms

    def faster(self, other: Measured) -> tuple[float, ...]:
        """How many times as many tokens a second as the other, all positions counted: a number a round."""
        ratio = self.tokens / other.tokens
        return tuple(ratio * theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True))


def spread(samples: Sequence[float]) -> float:
    """How far samples are apart: the largest less the smallest, over their median."""
    return (max(samples) - min(samples)) / statistics.median(samples)


def bench(
    model: Denoiser,
    runs: Mapping[str, Decoder],
    prompts: Sequence[Sequence[int]],
    *,
    repeats: int = 5,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[Measured]:
    """Measure each run's decoder on one batch of prompts.

    Args:
      model: the denoiser.
      runs: the decoders by key.
      prompts: token ids of each sequence of the batch.
      repeats: rounds, in each of which every run decodes once and runs each kind of pass PASSES_A_ROUND times.
      seed: of the sampling noise.
      on_progress: called with a line on what is done now.

    Raises:
      InputError: no decoder, prompts that cannot be used, or a method that does not go with the model.
      RunError: a decode that left positions undecided, or logits that are not finite.
    """
    if not runs or repeats < 1:
        raise InputError("a bench needs at least one method and one repeat")
    batch = [list(prompt) for prompt in prompts]
    decoders = {key: decoder.for_model(model.spec) for key, decoder in runs.items()}
    for decoder in decoders.values():  # refused before anything is compiled
        jax.eval_shape(lambda decoder=decoder: engine.init_state(model, decoder, batch, seed=seed))
    programs = {}
    for key, decoder in decoders.items():
        on_progress(f"{key}: compiling, and one decode to warm up")
        programs[key] = _Run(model, decoder, batch, seed)
    for i in range(repeats):
        for key, run in programs.items():
            on_progress(f"round {i + 1} of {repeats}: {key}")
            run.round()
    return [run.measured(key) for key, run in programs.items()]


def by_kind(
    model: Denoiser,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    repeats: int = 5,
    calls: int = 1,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda what: None,
) -> tuple[list[Kind], DecodeState]:
    """Decode one batch pass by pass, and time each kind of pass that occurs: the whole loop is not compiled, nor are bare
    products.

    Args:
      repeats: times each kind is timed.
      calls: passes in a row that are timed together; their mean counts, so that with many the call is no part of it.
      seed: of the sampling noise.
      on_progress: called with a line before each program is compiled.

    Returns:
      The kinds, and the state at the end without its cache.
    """
    batch = [list(prompt) for prompt in prompts]
    start = engine.init_state(model, decoder, batch, seed=seed)
    kinds, state = _walked(model, decoder, start, bare=False, calls=calls, on_progress=on_progress)
    for kind in kinds:
        for _ in range(repeats):
            kind.time()
    return [kind.measured() for kind in kinds], state


class _Run:
    """A method's programs, made and warmed up, and its times so far."""

    def __init__(self, model: Denoiser, decoder: Decoder, batch: list[list[int]], seed: int):
        self._start = lambda: jax.block_until_ready(engine.init_state(model, decoder, batch, seed=seed))
        start = self._start()
        # Kept here: the engine keeps few, and with many runs each round would compile all of them again.
        self._loop, compile_seconds = engine.compile_decode(model, decoder, start)
        _, self._weights = engine.split(model)
        warm = generation.Finished(*self._decode(), compile_seconds)
        stats = [answer.stats for answer in generation.answers(warm, batch, model, decoder, None)]
        self._fixed = dict(
            decoder=decoder,
            compile_seconds=compile_seconds,
            passes=int(warm.state.passes),
            nfe=sum(each.nfe for each in stats),
            tokens=len(batch) * decoder.gen_length,
            tokens_non_eos=sum(each.tokens_non_eos for each in stats),
            peak_bytes=_peak_bytes(self._loop),
        )
        self._seconds: list[float] = []
        self._kinds = _kinds(model, decoder, start, self._fixed["passes"])

    def _decode(self) -> tuple[DecodeState, float]:
        state = self._start()
        started = time.perf_counter()
        return jax.block_until_ready(self._loop(self._weights, state)), time.perf_counter() - started

    def round(self) -> None:
        self._seconds.append(self._decode()[1])
        for kind in self._kinds:
            for _ in range(PASSES_A_ROUND):
                kind.time()

    def measured(self, key: str) -> Measured:
        kinds = tuple(kind.measured() for kind in self._kinds)
        return Measured(run=key, seconds=tuple(self._seconds), kinds=kinds, **self._fixed)


class _KindRun:
    """A kind of pass: its program and the state before its first pass in a decode, to run it from again and again."""

    def __init__(
        self,
        model: Denoiser,
        decoder: Decoder,
        plan: int,
        state: DecodeState,
        cache: Any,
        *,
        passes: int = 0,
        bare: bool = True,
        calls: int = 1,
    ):
        graph, self._weights = engine.split(model)
        name = decoder.cache.plans[plan].name
        self._state, self._cache = state, _copied(cache)
        self.program, compile_seconds = engine._compile(
            engine._step, graph, self._weights, decoder, state, cache, plan=plan
        )
        rows = count_rows(model, decoder, state.replace(cache=cache), name)
        self._calls = calls
        self._products = compile_products(model, rows) if bare else None
        self._rows_in = rows_in(model, rows) if bare else None
        self._fixed = dict(
            name=name,
            compile_seconds=compile_seconds,
            rows=rows,
            weight_bytes=weight_bytes(model, rows),
            accessed_bytes=_accessed_bytes(self.program),
        )
        self.passes = passes
        self._seconds: list[float] = []
        self._bare: list[float] = []
        self._once()  # to warm up

    def time(self) -> None:
        seconds, bare = self._once()
        self._seconds.append(seconds)
        if bare is not None:
            self._bare.append(bare)

    def _once(self) -> tuple[float, float | None]:
        cache = jax.block_until_ready(_copied(self._cache))  # the program takes it over
        seconds = _seconds(self._passes, cache) / self._calls
        return seconds, None if self._products is None else _seconds(self._products, self._weights, self._rows_in)

    def _passes(self, cache: Any) -> Any:
        """All that the last pass gives, to wait for: a cache may be empty."""
        for _ in range(self._calls):
            state, cache = self.program(self._weights, self._state, cache)
        return state, cache

    def measured(self) -> Kind:
        return Kind(passes=self.passes, seconds=tuple(self._seconds), bare_seconds=tuple(self._bare), **self._fixed)


def _kinds(model: Denoiser, decoder: Decoder, state: DecodeState, passes: int) -> list[_KindRun]:
    """The kinds of passes that occur in a decode of ``passes`` passes, counted; where there are several, by decoding once more,
    pass by pass."""
    if len(decoder.cache.plans) == 1:
        return [_KindRun(model, decoder, 0, state.replace(cache=None), state.cache, passes=passes)]
    return _walked(model, decoder, state)[0]


def _walked(
    model: Denoiser,
    decoder: Decoder,
    state: DecodeState,
    *,
    on_progress: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> tuple[list[_KindRun], DecodeState]:
    """The kinds of passes that occur in a decode, counted, and the state at its end without its cache."""
    _, weights = engine.split(model)
    kinds: dict[int, _KindRun] = {}
    cache, state = state.cache, state.replace(cache=None)
    bound = decoder.max_passes * state.done.shape[0]
    while not bool(jnp.all(state.done)) and int(state.passes) < bound:
        plan = int(engine._needed(decoder, state.replace(cache=cache), model.spec))
        if plan not in kinds:
            on_progress(f"{decoder.name}: compiling {decoder.cache.plans[plan].name}")
            kinds[plan] = _KindRun(model, decoder, plan, state, cache, **options)
        state, cache = kinds[plan].program(weights, state, cache)
        kinds[plan].passes += 1
    return [kinds[plan] for plan in sorted(kinds)], state


def _copied(tree: Any) -> Any:
    """Every array once more, where it is: some may be in host memory."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), tree)


def _seconds(program: Callable, *inputs: Any) -> float:
    started = time.perf_counter()
    jax.block_until_ready(program(*inputs))
    return time.perf_counter() - started


def _peak_bytes(program: Any) -> int | None:
    plan = program.memory_analysis()
    if plan is None:
        return None
    kept = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return kept + plan.temp_size_in_bytes


def _accessed_bytes(program: Any) -> int | None:
    counted = program.cost_analysis()
    value = counted.get("bytes accessed") if isinstance(counted, dict) else None
    return None if value is None else int(value)
