"""The contract between the engine and the policies that steer it.

A policy is a frozen dataclass of hashable settings with pure methods, so a whole :class:`Decoder` is one static argument of
the jitted loop. Three parts decide what happens next:

* the *schedule* says which positions may be committed (a span);
* the *cache* runs the forward pass and says which rows were computed and what is kept of them. It has one or more *plans*,
  each a static layout of rows and thus a program of its own; in a batch, sequences that need another plan than the one
  that runs wait, untouched and uncounted;
* the *commit* rule picks, among the scored undecided positions of the span (and, if it likes, beyond it), those to write.

The engine guarantees what policies need not: only eligible positions are written, an unfinished sequence gains at least one
token a pass (unless the rule says ``may_stall``), prompts never change, finished sequences stay as they are, passes are
bounded and counted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from polestar_jax.decode.sampling import Sampling
from polestar_jax.decode.state import DecodeState, Pass, Scores
from polestar_jax.decode.trace import Trace
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.spec import ModelSpec


class Span(NamedTuple):
    """Generated positions [start, end) of block ``index``, each i32 [b]."""

    start: jax.Array
    end: jax.Array
    index: jax.Array


class Schedule(Protocol):
    """Which generated positions may be committed now."""

    capacity: int  # the number of rows scored a pass; a longer span is cut to it

    def next(self, undecided: jax.Array) -> Span:
        """The span to work on, from the undecided positions bool [b, G]; called when the last one is complete."""


class Plan(NamedTuple):
    """A program of a cache policy: its name, and the names of other plans whose sequences it serves as well."""

    name: str
    also: tuple[str, ...] = ()


class CachePolicy(Protocol):
    """Runs a forward pass over some rows and keeps what later passes reuse."""

    plans: tuple[Plan, ...]  # first come first: the first one that a sequence of the batch needs is run
    gives_drift: bool  # whether its passes have a drift

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        """The index of the plan that each sequence needs now, i32 [b]."""

    def init(self, spec: ModelSpec, state: DecodeState, dtype: jnp.dtype) -> Any:
        """The policy's pytree before the first pass (documented shapes); ``state`` gives b, p and G."""

    def forward(self, model: Denoiser, schedule: Schedule, state: DecodeState, plan: str) -> Pass:
        """One pass by a plan for the sequences ``state.active``; ``state.cache`` is this policy's pytree, whose part for the
        other sequences must stay as it is."""


class CommitRule(Protocol):
    """Picks the positions to commit."""

    may_stall: bool  # whether a pass may commit nothing
    needs_drift: bool  # whether it goes by Scores.drift

    def init(self, batch: int, gen_length: int) -> Any:
        """The rule's pytree before the first pass; every leaf leads with the batch axis."""

    def select(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, jax.Array, Any]:
        """(accept bool [b, G], reason i8 [b, G], the rule's new pytree); ``state.commit`` is the old one."""

    def recorded(self, own: Any) -> dict[str, jax.Array]:
        """Arrays for the trace by field name, from the rule's new pytree."""

    def max_passes(self, gen_length: int, spans: int) -> int:
        """A hard bound on the passes over ``gen_length`` positions in at most ``spans`` spans."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """A complete decoding method: hashable, immutable, compared by value.

    Attributes:
      name: the method's name as ``polestar methods`` lists it.
      gen_length: generated positions G.
      schedule, cache, commit: the three policies.
      sampling: how logits become proposed tokens and confidences.
      guidance: classifier-free guidance scale s >= 0; logits are u + (s + 1)(c - u), u from a masked prompt. 0: off.
      stop_at_eos: stop at the first complete span that contains an end-of-text token and fill the rest with it.
      trace: what to record, or None.
      kernels: "auto" (what the environment variable POLESTAR_KERNELS names, else Pallas kernels on NVIDIA GPUs and XLA
        elsewhere), "xla", "pallas" or "interpret" (Pallas kernels run by an interpreter, to test them); where a kernel
        cannot be had, XLA takes over with a notice, or, under ``strict_kernels``, decoding is refused.
      chosen: the method's settings as they were given, for reports; dropped when a policy is replaced.
    """

    name: str
    gen_length: int
    schedule: Schedule
    cache: CachePolicy
    commit: CommitRule
    sampling: Sampling = Sampling()  # noqa: RUF009 -- frozen
    guidance: float = 0.0
    stop_at_eos: bool = False
    trace: Trace | None = None
    kernels: str = "auto"
    strict_kernels: bool = False
    chosen: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        for part, methods in (("schedule", ("next",)), ("cache", ("init", "forward")), ("commit", ("init", "select"))):
            policy = getattr(self, part)
            if isinstance(policy, type) or not all(hasattr(policy, method) for method in methods):
                raise InputError(
                    f"{part} {policy!r} is not accepted: a policy with {' and '.join(methods)}, already made"
                )
            if not dataclasses.is_dataclass(policy):
                raise InputError(
                    f"{part} {type(policy).__name__} is not accepted: a frozen dataclass, compared by value"
                )

        longest = getattr(self.cache, "block_length", None)
        if longest is not None and self.schedule.capacity > longest:
            raise InputError(
                f"schedule {type(self.schedule).__name__} gives spans of up to {self.schedule.capacity} positions, and cache "
                f"{type(self.cache).__name__} holds blocks of {longest}"
            )
        if getattr(self.commit, "needs_drift", False) and not getattr(self.cache, "gives_drift", False):
            raise InputError(
                f"commit {type(self.commit).__name__} goes by token drift, and cache {type(self.cache).__name__} gives none"
            )

    def replace(self, **changes: Any) -> Decoder:
        same = changes.keys() <= {"trace", "chosen"}
        return dataclasses.replace(self, **({} if same else {"chosen": ()}) | changes)

    @property
    def max_passes(self) -> int:
        return self.commit.max_passes(self.gen_length, -(-self.gen_length // self.schedule.capacity))

    def settings(self) -> dict[str, Any]:
        """Every setting in force, flat: the decoder's own, then its policies'."""
        names = ("gen_length", "guidance", "stop_at_eos", "kernels", "strict_kernels")
        own = {name: getattr(self, name) for name in names}
        own |= {part: type(getattr(self, part)).__name__ for part in ("schedule", "cache", "commit")}
        for part in (self.schedule, self.cache, self.commit, self.sampling):
            own.update(settings_of(part))
        return own | dict(self.chosen)


def settings_of(policy: Any) -> dict[str, Any]:
    """A policy's settings; a policy that wraps others contributes theirs."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if isinstance(value, tuple) and all(map(dataclasses.is_dataclass, value)):
            values[field.name] = [{"rule": type(part).__name__} | settings_of(part) for part in value]
        else:
            values.update(settings_of(value) if dataclasses.is_dataclass(value) else {field.name: value})
    return values
