"""The contract between the engine and the policies that steer it.

A policy is a frozen dataclass of hashable settings with pure methods, so a whole :class:`Decoder` is one static argument of
the jitted loop. Three parts decide what happens next:

* the *schedule* says which positions may be committed (a span), and may cut a span once it has been scored;
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


class Needs(NamedTuple):
    """What a commit rule goes by beside the scores of the span's rows; static.

    Attributes:
      drift: how far each position's attention moved since the last pass (``Scores.drift``).
      attention: of so many of the last layers, what every row attends to (``Scores.attention``); 0: not needed.
      logits: the logits of the scored rows (``Scores.logits``).
      rows: which positions are scored: "span"; "computed": all those that a pass computes anyway; "every": all of the
        generation in every pass; "canvas": the prompt's too, and what is decided (``Scores.canvas``).
    """

    drift: bool = False
    attention: int = 0
    logits: bool = False
    rows: str = "span"


class Wanted(NamedTuple):
    """What a decoder wants of a pass.

    Attributes:
      capacity: the rows of the longest span.
      needs: what its commit rule needs.
      guided: whether each sequence comes twice, the second half of the batch with masked prompts; both must give the rows of
        the same positions, in the same order.
    """

    capacity: int
    needs: Needs
    guided: bool = False


class Schedule(Protocol):
    """Which generated positions may be committed now; :class:`polestar_jax.schedule.Spans` has defaults."""

    capacity: int  # the number of rows scored a pass; a longer span is cut to it

    def init(self, batch: int, gen_length: int) -> Any:
        """The schedule's pytree before the first pass; every leaf leads with the batch axis."""

    def next(self, undecided: jax.Array, last: jax.Array) -> Span:
        """The span to work on, from the undecided positions bool [b, G], called when the one before is complete; ``last``
        i32 [b] is that one's index, -1 at the start."""

    def fit(self, scores: Scores, state: DecodeState) -> tuple[jax.Array, Any]:
        """(end i32 [b], pytree) of the span after a pass has scored it and before anything is committed."""

    def most(self, gen_length: int) -> int:
        """How many spans there can be."""


class Plan(NamedTuple):
    """A program of a cache policy: its name, and the names of other plans whose sequences it serves as well."""

    name: str
    also: tuple[str, ...] = ()


class CachePolicy(Protocol):
    """Runs a forward pass over some rows and keeps what later passes reuse."""

    plans: tuple[Plan, ...]  # first come first: the first one that a sequence of the batch needs is run
    gives: frozenset[str]  # which of the needs "drift", "attention", "every" and "canvas" (rows) its passes can meet

    def wants(self, spec: ModelSpec, state: DecodeState) -> jax.Array:
        """The index of the plan that each sequence needs now, i32 [b]."""

    def init(self, spec: ModelSpec, wanted: Wanted, state: DecodeState, dtype: jnp.dtype) -> Any:
        """The policy's pytree before the first pass (documented shapes); ``state`` gives b, p and G."""

    def forward(self, model: Denoiser, wanted: Wanted, state: DecodeState, plan: str) -> Pass:
        """One pass by a plan for the sequences ``state.active``; ``state.cache`` is this policy's pytree, whose part for the
        other sequences must stay as it is."""

    def observe(self, own: Any, scores: Scores, accept: jax.Array, state: DecodeState) -> Any:
        """The policy's pytree ``own`` after a pass, once it is known what is committed, bool [b, G]; ``state`` is the one
        before the pass. :class:`polestar_jax.cache.Cache` leaves it as it is."""


class CommitRule(Protocol):
    """Picks the positions to commit."""

    may_stall: bool  # whether a pass may commit nothing
    needs: Needs  # what it goes by

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
        for part, methods in _METHODS.items():
            policy = getattr(self, part)
            if isinstance(policy, type) or not all(hasattr(policy, method) for method in methods):
                raise InputError(f"{part} {policy!r} is not accepted: a policy with {', '.join(methods)}, already made")
            if not dataclasses.is_dataclass(policy):
                raise InputError(
                    f"{part} {type(policy).__name__} is not accepted: a frozen dataclass, compared by value"
                )

        for part in ("cache", "commit"):
            policy = getattr(self, part)
            longest, follows = getattr(policy, "block_length", None), getattr(policy, "follows", None)
            if longest is not None and self.schedule.capacity > longest:
                raise InputError(
                    f"schedule {type(self.schedule).__name__} gives spans of up to {self.schedule.capacity} positions, and "
                    f"{part} {type(policy).__name__} holds blocks of {longest}"
                )
            if follows is not None and not isinstance(self.schedule, follows):
                raise InputError(
                    f"{part} {type(policy).__name__} goes with schedule {follows.__name__}, not {type(self.schedule).__name__}"
                )
        for part in (self.schedule, self.cache, self.commit):
            if getattr(part, "gen_length", self.gen_length) != self.gen_length:
                raise InputError(f"{type(part).__name__} is for gen_length {part.gen_length}, not {self.gen_length}")
        needs, gives = self.wanted.needs, getattr(self.cache, "gives", frozenset())
        asked = {"drift": needs.drift, "attention": needs.attention, needs.rows: needs.rows in ("every", "canvas")}
        for need in asked:
            if asked[need] and need not in gives:
                raise InputError(
                    f"commit {type(self.commit).__name__} goes by {_NEEDED[need]}, and cache "
                    f"{type(self.cache).__name__} gives none"
                )

    @property
    def wanted(self) -> Wanted:
        """What a pass is to give."""
        return Wanted(self.schedule.capacity, getattr(self.commit, "needs", Needs()), self.guidance > 0)

    def for_model(self, spec: ModelSpec, tokenizer: Any = None) -> Decoder:
        """This decoder for a model: settings that are None and differ by family (``per_family`` of a policy, by name) get the
        family's value, those that are a size of the model (``of_model``, names of its spec) that size, and a schedule that goes
        by tokens (``for_tokens``) their ids."""
        changes, named = {}, {}
        for part in ("schedule", "cache", "commit"):
            changes[part], known = _of_model(getattr(self, part), spec)
            named |= known
        if hasattr(self.schedule, "for_tokens"):
            changes["schedule"] = changes["schedule"].for_tokens(spec, tokenizer)
            if changes["schedule"] != self.schedule:
                named |= {"delimiters": changes["schedule"].delimiters}
        if not named:
            return self
        chosen = tuple((name, named.get(name, value) if value is None else value) for name, value in self.chosen)
        return dataclasses.replace(self, **changes, chosen=chosen)

    def replace(self, **changes: Any) -> Decoder:
        same = changes.keys() <= {"trace", "chosen"}
        return dataclasses.replace(self, **({} if same else {"chosen": ()}) | changes)

    @property
    def max_passes(self) -> int:
        return self.commit.max_passes(self.gen_length, self.schedule.most(self.gen_length))

    def settings(self) -> dict[str, Any]:
        """Every setting in force, flat: the decoder's own, then its policies'."""
        names = ("gen_length", "guidance", "stop_at_eos", "kernels", "strict_kernels")
        own = {name: getattr(self, name) for name in names}
        own |= {part: type(getattr(self, part)).__name__ for part in ("schedule", "cache", "commit")}
        for part in (self.schedule, self.cache, self.commit, self.sampling):
            own.update(settings_of(part))
        return own | dict(self.chosen)


_METHODS = {
    "schedule": ("init", "next", "fit", "most"),
    "cache": ("init", "wants", "forward", "observe"),
    "commit": ("init", "select"),
}
_NEEDED = {
    "drift": "token drift",
    "attention": "the attention of every row",
    "every": "the scores of every generated position in every pass",
    "canvas": "the scores of the whole canvas",
}


def _of_model(policy: Any, spec: ModelSpec) -> tuple[Any, dict[str, Any]]:
    """A policy, and those it wraps, with the model's values where it has none; and these values by name."""
    if not dataclasses.is_dataclass(policy):
        return policy, {}
    changes, named = {}, {}
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if value is None and field.name in getattr(policy, "per_family", {}):
            changes[field.name] = named[field.name] = policy.per_family[field.name][spec.family]
        elif value is None and field.name in getattr(policy, "of_model", ()):
            changes[field.name] = named[field.name] = getattr(spec, field.name)
        elif dataclasses.is_dataclass(value):
            inner, known = _of_model(value, spec)
            named |= known
            changes |= {field.name: inner} if known else {}
    return (dataclasses.replace(policy, **changes) if changes else policy), named


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
