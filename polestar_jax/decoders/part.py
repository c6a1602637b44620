"""What every method's settings have, and what a part of a method is: one of its three policies with the settings it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_kernels import dispatch
from polestar_jax.decode.policy import CommitRule
from polestar_jax.errors import InputError
from polestar_jax.settings import Setting

COMMON = {
    "gen_length": Setting(type=int, default=256, low=1, help="generated positions"),
    "block_length": Setting(
        type=int, default=None, low=1, help="positions of a block, a divisor of gen_length; none: 32, or gen_length below 32"
    ),
    "temperature": Setting(type=float, default=0.0, low=0, least=1e-3, high=1e3, help="0: arg max; else samples"),
    "exclude_mask": Setting(type=bool, default=True, help="bar the mask token (off: parity with samplers that do not)"),
    "eos": Setting(
        type=str, default="allow", choices=("allow", "last", "never"),
        help="end-of-text and end-of-turn tokens: free, committed after all others, or barred",
    ),
    "stop_at_eos": Setting(type=bool, default=False, help="stop at the first complete block with an end of text"),
    "kernels": Setting(
        type=str, default=dispatch.AUTO, choices=(dispatch.AUTO, *dispatch.BACKENDS),
        help="what computes attention, drift, residuals and scores: Pallas kernels where they can be had (auto), or as named",
    ),
    "strict_kernels": Setting(type=bool, default=False, help="refuse to decode where a named kernel cannot be had"),
    "guidance": Setting(type=float, default=0.0, low=0, high=1e3, help="classifier-free guidance; doubles the rows"),
}  # fmt: skip
FILTERS = {
    "top_p": Setting(type=float, default=None, above=0, high=1, help="nucleus filter of the tempered distribution"),
    "top_k": Setting(type=int, default=None, low=1, help="top-k filter of the tempered distribution"),
    "filtered_confidence": Setting(
        type=bool,
        default=False,
        help="rank by the tempered, filtered distribution (Dream's sampler) instead of the plain softmax",
    ),
}


class Frame(NamedTuple):
    """What a part is built into.

    Attributes:
      gen_length, block_length: checked.
      capacity: the longest span of the schedule (caches and rules only).
      rule: the commit rule (caches only).
    """

    gen_length: int
    block_length: int
    capacity: int = 0
    rule: CommitRule | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A schedule, a cache or a commit rule that methods are made of.

    Attributes:
      build: (settings by name, frame) -> policy.
      settings: what it takes.
      summary: what it does, one line.
      whole: of a schedule, whether its block is the whole generation where no block_length is given.
    """

    build: Callable[[dict[str, Any], Frame], Any]
    summary: str
    settings: dict[str, Setting] = dataclasses.field(default_factory=dict)
    whole: bool = False


def own(policy: type, values: dict[str, Any], **more: Any) -> Any:
    """A policy from those of the settings that are its fields, and ``more``."""
    return policy(**{f.name: values[f.name] for f in dataclasses.fields(policy) if f.name in values} | more)


def lengths(values: dict[str, Any], *, whole: bool = False) -> Frame:
    """The checked lengths among the settings; ``whole``: of one block by default."""
    gen_length = values["gen_length"]
    block_length = values["block_length"] or (gen_length if whole else min(32, gen_length))
    if gen_length % block_length:
        whole = gen_length // block_length * block_length
        near = f"{whole} or {whole + block_length}" if whole else str(block_length)
        raise InputError(
            f"gen_length {gen_length} is not a multiple of block_length {block_length}; "
            f"use gen_length {near}, or a block_length that divides {gen_length}"
        )
    return Frame(gen_length, block_length)
