"""The cache policies by name, with their settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from polestar_jax import cache
from polestar_jax.cache.elastic import AXES
from polestar_jax.cache.fast_dllm import FIRST_TOKENS
from polestar_jax.commit.certainty import NARROWEST, WIDEST
from polestar_jax.decoders.part import Frame, Part, own
from polestar_jax.polestar.cache import PolestarCache
from polestar_jax.polestar.presets import SETTINGS
from polestar_jax.settings import Setting

FIRST_TOKEN = {
    "first_token": Setting(
        type=str, default=FIRST_TOKENS[0], choices=FIRST_TOKENS,
        help="of a block, for Dream: read from the row before it, or decided by the entry whatever its confidence",
    ),
}  # fmt: skip


ENTROPY = {
    "entropy_threshold": Setting(
        type=float, default=0.5, help="nats: every row is computed after a commit from a distribution of more"
    ),
    "recent": Setting(type=int, default=None, low=0, help="positions committed last that are computed; none: block_length"),
    "entry_full": Setting(type=bool, default=False, help="a block's entry computes every row"),
}  # fmt: skip
DELAYED = {
    "refresh_every": Setting(type=int, default=8, low=1, help="every row in every so many passes of a block; 1: in all"),
}  # fmt: skip
DROPOUT = FIRST_TOKEN | {
    "suffix_cache": Setting(type=str, default="none", choices=("none", "prefix", "dual"), help="whose suffix is dropped"),
    "suffix_scale": Setting(
        type=float, default=None, low=0, none="LLaDA 2, Dream 1.6", help="of the probability to keep a position of the suffix"
    ),
    "suffix_decay": Setting(type=float, default=None, low=0, none="4", help="how many deviations the window spans"),
    "suffix_window": Setting(type=int, default=None, low=0, none="256", help="positions behind the block that may be kept"),
}  # fmt: skip
REFRESHES = {
    "prompt_interval": Setting(
        type=int, default=50, low=1, none="never again", help="passes from one refresh of the prompt to the next"
    ),
    "response_interval": Setting(type=int, default=7, low=1, none="never again", help="the same of all generated rows"),
}  # fmt: skip
DYNAMIC = {name: dataclasses.replace(setting, default=None) for name, setting in REFRESHES.items()} | {
    "window_budget": Setting(
        type=int, default=None, low=1, help="positions around the last commit that every layer computes; none: gen_length / 8"
    ),
    "layer_budget": Setting(
        type=int, default=None, low=0, help="generated rows outside that window, a layer on average; none: gen_length / 8"
    ),
    "budget_scale": Setting(
        type=float, default=200.0, low=0, help="layers share the budget by softmax(scale x how far their values moved); 0: evenly"
    ),
}  # fmt: skip
DLLM = REFRESHES | {
    "rho": Setting(type=float, default=0.25, low=0, high=1, help="share of the generated rows that every layer computes"),
}  # fmt: skip
SPARSE = {
    "keep_ratio": Setting(type=float, default=0.5, low=0, high=1, help="share of the columns outside the block that are kept"),
    "pool_width": Setting(type=int, default=3, low=1, help="columns whose importance one column takes the largest of; odd"),
}  # fmt: skip


def _dynamic(values: dict[str, Any], frame: Frame) -> cache.DynamicCache:
    for name in ("window_budget", "layer_budget"):
        values[name] = max(1, frame.gen_length // 8) if values[name] is None else values[name]
    return own(cache.DynamicCache, values)


ELASTIC = {
    "sliding_window": Setting(type=int, default=32, low=1, help="undecided positions that a pass scores, the first of the span"),
    "gamma": Setting(
        type=float, default=0.9, help="refresh the layers above one whose tracked tokens' attention is less alike (cosine)"
    ),
    "tracked": Setting(type=int, default=1, low=1, help="decided tokens tracked a layer: those that the window attends to most"),
    "sim_axis": Setting(
        type=str, default=AXES[0], choices=AXES, help="what the cosine is across; heads: as the authors' code, averaged over keys"
    ),
}  # fmt: skip
D2 = {
    "candidates": Setting(type=int, default=32, low=1, help="promising undecided positions that a pass computes"),
    "influential": Setting(
        type=float, default=0.1, low=0, high=1, help="share of the attention's influence whose columns a pass computes too"
    ),
    "inflation": Setting(type=int, default=0, low=0, help="gaps of at most so many columns between those are computed too"),
    "density_sigma": Setting(
        type=float, default=10.0, low=NARROWEST, high=WIDEST, help="what promises is near decided ones: the Gaussian's width"
    ),
    "conf_update": Setting(
        type=bool, default=True, help="rank by the last confidence of each position (false: the first, as the authors' code)"
    ),
    "row_capacity": Setting(
        type=int, default=None, low=2, help="rows that a pass may compute; none: what 2 x candidates and that share can need"
    ),
}  # fmt: skip
TRUNCATED = {
    "truncate": Setting(
        type=bool, default=True, help="hide what lies behind a cycle's end in its fast passes but the first (schedule=cycles)"
    ),
}  # fmt: skip


def _entropy(values: dict[str, Any], frame: Frame) -> cache.EntropyCache:
    recent = frame.block_length if values["recent"] is None else values["recent"]
    return own(cache.EntropyCache, values, block_length=frame.capacity, recent=recent)


def _dropout(values: dict[str, Any], frame: Frame) -> cache.SuffixDropout:
    return own(cache.SuffixDropout, values, inside=CACHES[values["suffix_cache"]].build(values, frame))


def _polestar(values: dict[str, Any], frame: Frame) -> PolestarCache:
    for name, blocks in (("window_prefix", 2), ("window_suffix", 1)):
        values[name] = blocks * frame.block_length if values[name] is None else values[name]
    suffix = bool(getattr(frame.rule, "suffix_commit", False))
    return own(PolestarCache, values, block_length=frame.capacity, score_suffix=suffix)


CACHES = {
    "none": Part(build=lambda values, frame: cache.NoCache(), summary="every row is computed in every pass"),
    "prefix": Part(
        build=lambda values, frame: own(
            cache.PrefixCache, values, block_length=frame.capacity, gen_length=frame.gen_length
        ),
        summary="every row at a block's entry, then the block's and all after it",
        settings=FIRST_TOKEN,
    ),
    "dual": Part(
        build=lambda values, frame: own(cache.DualCache, values, block_length=frame.capacity),
        summary="every row at a block's entry, then the block's alone",
        settings=FIRST_TOKEN,
    ),
    "polestar": Part(
        build=_polestar,
        summary="the block's rows, and those of a window whose clusters drifted",
        settings={
            name: setting
            for name, setting in SETTINGS.items()
            if name in {field.name for field in dataclasses.fields(PolestarCache)}
        },
    ),
    "entropy": Part(
        build=_entropy,
        summary="every row after a commit from an uncertain distribution, else the span's undecided and those committed last",
        settings=ENTROPY,
    ),
    "dkv": Part(
        build=lambda values, frame: own(
            cache.DelayedCache, values, block_length=frame.capacity, gen_length=frame.gen_length
        ),
        summary="what is undecided and what the last pass decided, now and then every row",
        settings=DELAYED,
    ),
    "dpad": Part(
        build=_dropout,
        summary="none, prefix or dual, blind to most of the suffix",
        settings=DROPOUT,
    ),
    "elastic": Part(
        build=lambda values, frame: own(cache.ElasticCache, values),
        summary="a sliding window, and every row above a layer whose attention drifted",
        settings=ELASTIC,
    ),
    "d2": Part(
        build=lambda values, frame: own(cache.D2Cache, values),
        summary="after the first pass, promising, new and influential rows",
        settings=D2,
    ),
    "truncated": Part(
        build=lambda values, frame: own(cache.Truncated, values, inside=cache.NoCache()),
        summary="none, blind in fast passes to what lies behind the cycle",
        settings=TRUNCATED,
    ),
    "dynamic": Part(
        build=_dynamic,
        summary="generated rows around the last commit, and more where a layer's values moved more",
        settings=DYNAMIC,
    ),
    "dllm_cache": Part(
        build=lambda values, frame: own(cache.DLLMCache, values),
        summary="a share of the generated rows, those whose values moved most; all of them, and the prompt, now and then",
        settings=DLLM,
    ),
    "sparse": Part(
        build=lambda values, frame: own(cache.SparseCache, values, block_length=frame.capacity),
        summary="every row in a block's first two passes, then the block's, blind to all but the important columns",
        settings=SPARSE,
    ),
}
