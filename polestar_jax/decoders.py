"""The decoding methods by name: each builds a :class:`Decoder` from checked settings.

``decoders.vanilla(gen_length=256, block_length=32, order="entropy")`` and ``polestar generate --method vanilla --set
order=entropy`` are the same thing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels import dispatch
from polestar_jax import commit
from polestar_jax.cache import NoCache
from polestar_jax.decode.policy import CachePolicy, Decoder
from polestar_jax.decode.sampling import Sampling
from polestar_jax.errors import InputError
from polestar_jax.fast_dllm import FIRST_TOKENS, DualCache, PrefixCache
from polestar_jax.polestar.cache import PolestarCache
from polestar_jax.polestar.commit import PolestarCommit
from polestar_jax.polestar.presets import RELEASE, SETTINGS
from polestar_jax.schedule import Blocks
from polestar_jax.settings import Setting, checked

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
VANILLA = COMMON | FILTERS | {
    "steps": Setting(type=int, default=None, low=1, help="forward passes in all, the same for every block; none: gen_length"),
    "order": Setting(
        type=str, default="low_confidence", choices=(*commit.ORDERS, "origin"),
        help="what positions are ranked by; low_confidence (LLaDA) and maskgit_plus (Dream) rank alike",
    ),
    "quota": Setting(
        type=str, default="uniform", choices=("uniform", "dream_floor"),
        help="commits a pass: masks / steps with the remainder first, or Dream's floored share of what is left",
    ),
    "eps": Setting(type=float, default=1e-3, above=0, high=0.5, help="last time of dream_floor and origin"),
    "order_temperature": Setting(type=float, default=0.0, low=0, least=1e-3, high=1e3, help="draws positions (Dream's alg_temp)"),
}  # fmt: skip
PARALLEL = COMMON | FILTERS | {
    "threshold": Setting(type=float, default=0.9, help="commit every position with at least this confidence, else the best one"),
    "steps": Setting(
        type=int, default=None, low=1,
        help="caps commits: a pass may commit masks / steps plus what earlier passes left unused; none: no cap. "
        "Passes go on until all is decided, so under a threshold steps is no number of passes",
    ),
}  # fmt: skip


FACTOR = COMMON | FILTERS | {
    "factor": Setting(type=float, default=1.0, low=0, help="commit the n best while (n + 1)(1 - the n-th confidence) <= factor"),
}  # fmt: skip
FAST_DLLM = COMMON | FILTERS | {
    "threshold": Setting(
        type=float, default=0.9, none="a fixed number a pass, by steps",
        help="commit every position with at least this confidence, else the best one",
    ),
    "factor": Setting(type=float, default=None, low=0, help="the factor rule instead of the threshold; none: the threshold"),
    "steps": Setting(type=int, default=None, low=1, help="passes in all where threshold and factor are none; none: gen_length"),
    "first_token": Setting(
        type=str, default=FIRST_TOKENS[0], choices=FIRST_TOKENS,
        help="of a block, for Dream: read from the row before it, or decided by the entry whatever its confidence",
    ),
}  # fmt: skip
POLESTAR = COMMON | FILTERS | SETTINGS


def vanilla(**settings: Any) -> Decoder:
    """A fixed number of commits a pass, no cache: the samplers of LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487).

    Settings: see ``METHODS["vanilla"].settings``. One token a pass by default, so NFE = gen_length.
    """
    values = checked(VANILLA, settings, "vanilla")
    gen_length, block_length = _lengths(values)
    each = _steps(values, gen_length, block_length)
    if values["order"] == "origin":
        rule: commit.Rule = commit.Origin(steps_per_block=each, eps=values["eps"])
    else:
        rule = commit.Quota(
            steps_per_block=each, order=values["order"], quota=values["quota"], eps=values["eps"],
            order_temperature=values["order_temperature"],
        )  # fmt: skip
    return _decoder("vanilla", values, block_length, rule)


def parallel(**settings: Any) -> Decoder:
    """Confidence-threshold decoding, no cache (the parallel decoding of Fast-dLLM, arXiv 2505.22618).

    Settings: see ``METHODS["parallel"].settings``.
    """
    values = checked(PARALLEL, settings, "parallel")
    _, block_length = _lengths(values)
    if values["steps"] is None:
        rule: commit.Rule = commit.threshold(values["threshold"])
    else:
        rule = commit.Allowance(threshold=values["threshold"], steps=values["steps"])
    return _decoder("parallel", values, block_length, rule)


def fast_dllm_factor(**settings: Any) -> Decoder:
    """As many positions as the factor rule allows, no cache (Fast-dLLM's dynamic factor, arXiv 2505.22618).

    Settings: see ``METHODS["fast_dllm_factor"].settings``.
    """
    values = checked(FACTOR, settings, "fast_dllm_factor")
    return _decoder("fast_dllm_factor", values, _lengths(values)[1], commit.Factor(values["factor"]))


def fast_dllm_prefix(**settings: Any) -> Decoder:
    """The rows before a block are kept while it is decoded (Fast-dLLM, arXiv 2505.22618).

    Settings: see ``METHODS["fast_dllm_prefix"].settings``.
    """
    return _fast_dllm("fast_dllm_prefix", settings)


def fast_dllm_dual(**settings: Any) -> Decoder:
    """All rows but the block's are kept while it is decoded (Fast-dLLM, arXiv 2505.22618).

    Settings: see ``METHODS["fast_dllm_dual"].settings``.
    """
    return _fast_dllm("fast_dllm_dual", settings)


def _fast_dllm(name: str, settings: dict[str, Any]) -> Decoder:
    values = checked(FAST_DLLM, settings, name)
    gen_length, block_length = _lengths(values)
    if values["steps"] is not None and (values["factor"], values["threshold"]) != (None, None):
        raise InputError(f"setting steps={values['steps']} goes with threshold=none and factor=none alone")
    if values["factor"] is not None:
        rule: commit.Rule = commit.Factor(values["factor"])
    elif values["threshold"] is not None:
        rule = commit.threshold(values["threshold"])
    else:
        rule = commit.Quota(steps_per_block=_steps(values, gen_length, block_length))
    if values["first_token"] == "force":
        rule = commit.ForcedEntry(rule)
    parts = dict(block_length=block_length, first_token=values["first_token"])
    cache = PrefixCache(gen_length=gen_length, **parts) if name == "fast_dllm_prefix" else DualCache(**parts)
    return _decoder(name, values, block_length, rule, cache)


def polestar(preset: str = "paper", **settings: Any) -> Decoder:
    """Drift-aware cache and commits (Polestar, arXiv 2607.14107).

    Settings: see ``METHODS["polestar"].settings``; ``preset`` "paper" or "release" gives the defaults.
    """
    given = {"preset": preset} | settings
    values = checked(POLESTAR, (RELEASE if isinstance(preset, str) and preset == "release" else {}) | given, "polestar")
    _, block_length = _lengths(values)
    for name, blocks in (("window_prefix", 2), ("window_suffix", 1)):
        values[name] = blocks * block_length if values[name] is None else values[name]
    own = lambda policy: {f.name: values[f.name] for f in dataclasses.fields(policy) if f.name in values}  # noqa: E731
    rule = PolestarCommit(**own(PolestarCommit))
    cache = PolestarCache(**own(PolestarCache) | {"block_length": block_length, "score_suffix": rule.suffix_commit})
    return _decoder("polestar", values, block_length, rule, cache)


def _steps(values: dict[str, Any], gen_length: int, block_length: int) -> int:
    """Passes that a block takes, of ``steps`` in all."""
    blocks = gen_length // block_length
    steps = gen_length if values["steps"] is None else values["steps"]
    if steps % blocks or steps > gen_length:
        raise InputError(
            f"setting steps={steps} is not accepted: a multiple of the {blocks} blocks "
            f"(gen_length {gen_length} / block_length {block_length}) up to gen_length"
        )
    return steps // blocks


def _lengths(values: dict[str, Any]) -> tuple[int, int]:
    gen_length = values["gen_length"]
    block_length = values["block_length"] or min(32, gen_length)
    if gen_length % block_length:
        whole = gen_length // block_length * block_length
        near = f"{whole} or {whole + block_length}" if whole else str(block_length)
        raise InputError(
            f"gen_length {gen_length} is not a multiple of block_length {block_length}; "
            f"use gen_length {near}, or a block_length that divides {gen_length}"
        )
    return gen_length, block_length


def _decoder(
    name: str, values: dict[str, Any], block_length: int, rule: commit.Rule, cache: CachePolicy | None = None
) -> Decoder:
    fields = {field.name for field in dataclasses.fields(Sampling)}
    return Decoder(
        name=name,
        gen_length=values["gen_length"],
        schedule=Blocks(block_length=block_length),
        cache=NoCache() if cache is None else cache,
        commit=rule,
        sampling=Sampling(**{key: value for key, value in values.items() if key in fields}),
        guidance=values["guidance"],
        stop_at_eos=values["stop_at_eos"],
        kernels=values["kernels"],
        strict_kernels=values["strict_kernels"],
        chosen=tuple((values | {"block_length": block_length}).items()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A named method: how to build it, its settings, what its presets change of them, and where it comes from."""

    build: Callable[..., Decoder]
    settings: dict[str, Setting]
    summary: str
    source: str
    presets: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


METHODS = {
    "vanilla": Method(
        build=vanilla,
        settings=VANILLA,
        summary="a fixed number of commits a pass, every row recomputed",
        source="LLaDA, arXiv 2502.09992; Dream, arXiv 2508.15487",
    ),
    "parallel": Method(
        build=parallel,
        settings=PARALLEL,
        summary="every position above a confidence threshold, every row recomputed",
        source="Fast-dLLM, arXiv 2505.22618",
    ),
    "fast_dllm_prefix": Method(
        build=fast_dllm_prefix,
        settings=FAST_DLLM,
        summary="a confidence threshold; a block's entry computes every row, a step the block and all after it",
        source="Fast-dLLM, arXiv 2505.22618",
    ),
    "fast_dllm_dual": Method(
        build=fast_dllm_dual,
        settings=FAST_DLLM,
        summary="a confidence threshold; a block's entry computes every row, a step the block's alone",
        source="Fast-dLLM, arXiv 2505.22618",
    ),
    "fast_dllm_factor": Method(
        build=fast_dllm_factor,
        settings=FACTOR,
        summary="as many of the most confident as a factor allows, every row recomputed",
        source="Fast-dLLM, arXiv 2505.22618",
    ),
    "polestar": Method(
        build=polestar,
        settings=POLESTAR,
        summary="a cache refreshed, and tokens committed, where token representations drift",
        source="Polestar, arXiv 2607.14107",
        presets={"paper": {}, "release": RELEASE},
    ),
}
