"""Cache policies: how a forward pass is run and what it leaves for the next one."""

from polestar_jax.cache.base import (
    KV,
    Cache,
    Cached,
    computed,
    every_read,
    live_rows,
    nothing_cached,
    row_reads,
    span_reads,
)
from polestar_jax.cache.d2 import D2Cache
from polestar_jax.cache.dkv import DelayedCache
from polestar_jax.cache.dllm_cache import DLLMCache
from polestar_jax.cache.dpad import SuffixDropout
from polestar_jax.cache.dynamic import DynamicCache
from polestar_jax.cache.elastic import ElasticCache
from polestar_jax.cache.entropy import EntropyCache
from polestar_jax.cache.fast_dllm import DualCache, PrefixCache
from polestar_jax.cache.none import NoCache
from polestar_jax.cache.sparse import SparseCache
from polestar_jax.cache.truncated import Truncated

__all__ = [
    "KV",
    "Cache",
    "Cached",
    "D2Cache",
    "DLLMCache",
    "DelayedCache",
    "DualCache",
    "DynamicCache",
    "ElasticCache",
    "EntropyCache",
    "NoCache",
    "PrefixCache",
    "SparseCache",
    "SuffixDropout",
    "Truncated",
    "computed",
    "every_read",
    "live_rows",
    "nothing_cached",
    "row_reads",
    "span_reads",
]
