"""The decoding methods by name: each builds a :class:`Decoder` from checked settings.

``decoders.vanilla(gen_length=256, block_length=32, order="entropy")`` and ``polestar generate --method vanilla --set
order=entropy`` are the same thing. A method is a schedule, a cache and a commit rule; ``schedule=``, ``cache=`` and ``commit=``
put another method's in their place: ``decoders.polestar(commit="klass")``.
"""

from polestar_jax.decode.policy import Decoder
from polestar_jax.decoders.method import PARTS, Method
from polestar_jax.decoders.methods import METHODS

vanilla = METHODS["vanilla"].build
parallel = METHODS["parallel"].build
fast_dllm_prefix = METHODS["fast_dllm_prefix"].build
fast_dllm_dual = METHODS["fast_dllm_dual"].build
fast_dllm_factor = METHODS["fast_dllm_factor"].build
entropy_cache = METHODS["entropy_cache"].build
adablock = METHODS["adablock"].build
dkv_cache = METHODS["dkv_cache"].build
dpad = METHODS["dpad"].build
dynamic_dllm = METHODS["dynamic_dllm"].build
dllm_cache = METHODS["dllm_cache"].build
sparse_dllm = METHODS["sparse_dllm"].build
elastic_cache = METHODS["elastic_cache"].build
d2_cache = METHODS["d2_cache"].build
klass = METHODS["klass"].build
dawn = METHODS["dawn"].build
hierarchy = METHODS["hierarchy"].build
prophet = METHODS["prophet"].build
slowfast = METHODS["slowfast"].build
polestar = METHODS["polestar"].build

__all__ = ["METHODS", "PARTS", "Decoder", "Method", *METHODS]
