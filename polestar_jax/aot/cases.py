"""What can be compiled ahead, by name: the denoiser, its kernels, and the decoding methods' step and loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.vocab_scores import VocabScores, vocab_scores
from polestar_jax import decoders
from polestar_jax.aot.compile import Case
from polestar_jax.aot.kernels import KERNELS
from polestar_jax.decode import engine
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.state import DecodeState
from polestar_jax.errors import InputError
from polestar_jax.models.denoiser import Denoiser
from polestar_jax.models.published import PUBLISHED
from polestar_jax.polestar.residency import fetch, park
from polestar_jax.polestar.residuals import Stored
from polestar_jax.spec import ModelSpec

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large a case is.

    Attributes:
      model: a key of PUBLISHED.
      layers: keep only the first layers; None for all.
      prompt: prompt columns; gen: generated positions; block: positions of a block; batch: sequences.
      dtype: of the weights.
      settings: of the decoding method, (name, value as text) each.

    Raises:
      InputError: a value out of range.
    """

    model: str = "llada-8b"
    layers: int | None = None
    prompt: int = 512
    gen: int = 256
    block: int = 32
    batch: int = 1
    dtype: str = "bfloat16"
    settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, value, accepted in (("model", self.model, PUBLISHED), ("dtype", self.dtype, DTYPES)):
            if value not in accepted:
                raise InputError(f"{name} {value!r} is not known; accepted: {', '.join(accepted)}")
        depth = PUBLISHED[self.model].n_layers
        if self.layers is not None and not 1 <= self.layers <= depth:
            raise InputError(f"layers {self.layers} is not in 1..{depth}, the depth of {self.model}")
        object.__setattr__(self, "settings", tuple(map(tuple, self.settings)))  # lists, where it came as JSON
        for name in ("prompt", "gen", "block", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)} is not positive")

    @property
    def spec(self) -> ModelSpec:
        """The published spec at this depth."""
        spec = PUBLISHED[self.model]
        return spec if self.layers is None else dataclasses.replace(spec, n_layers=self.layers)

    def split_model(self) -> tuple[nnx.GraphDef, nnx.State]:
        """The denoiser's structure and its weights as ShapeDtypeStructs."""
        return nnx.split(Denoiser.abstract(self.spec, jnp.dtype(self.dtype)))


def make(what: str, size: Size) -> Case:
    """The case of this name; see :func:`names`.

    Raises:
      InputError: no such case.
    """
    if what in KERNELS:
        return KERNELS[what](size)
    if what == "forward":
        return _forward(size)
    if what in _decodings():
        return _decoding(*_decodings()[what], size)
    raise InputError(f"case {what!r} is not known; accepted: {', '.join(names())}")


def names() -> list[str]:
    """Every accepted name: each single kernel, "forward", and of every decoding method its loop, "METHOD-loop", and its passes:
    "METHOD-step", or one for each plan of its cache, such as "polestar-refresh-step"."""
    return [*KERNELS, "forward", *_decodings()]


def _decodings() -> dict[str, tuple[str, int | None]]:
    """Case name -> (method, index of the plan of one pass, or None for the whole loop)."""
    cases: dict[str, tuple[str, int | None]] = {}
    for method, entry in decoders.METHODS.items():
        plans = entry.build().cache.plans
        labels = [plan.name.replace(" ", "-") for plan in plans] if len(plans) > 1 else ["step"]
        cases |= {f"{method}-{label}": (method, i) for i, label in enumerate(labels)} | {
            f"{method}-loop": (method, None)
        }
    return cases


def _forward(size: Size) -> Case:
    """One full pass over prompt and generation, and the scores of one block's rows."""
    graph, weights = size.split_model()
    ids = jax.ShapeDtypeStruct((size.batch, size.prompt + size.gen), jnp.int32)

    def forward(weights: nnx.State, tokens: jax.Array, positions: jax.Array, start: jax.Array) -> VocabScores:
        denoiser = nnx.merge(graph, weights)
        rows = jax.lax.dynamic_slice_in_dim(denoiser(tokens, positions), start, size.block, axis=1)
        return vocab_scores(denoiser.logits(rows), barred=(size.spec.mask_id,))

    start = jax.ShapeDtypeStruct((), jnp.int32)
    return Case(name=f"{size.model} forward", function=forward, args=(weights, ids, ids, start))


def _decoding(method: str, plan: int | None, size: Size) -> Case:
    """A method's pass or whole loop at its default settings, the state donated."""
    graph, weights = size.split_model()
    decoder = _decoder(method, size)
    prompts = [[size.spec.eos_id] * size.prompt] * size.batch  # only the shapes count

    def start(weights: nnx.State) -> DecodeState:
        return engine.init_state(nnx.merge(graph, weights), decoder, prompts, columns=size.prompt)

    def run(weights: nnx.State, state: DecodeState) -> DecodeState:
        model = nnx.merge(graph, weights)
        state = _moved(decoder, state, lambda layer: park(jax.tree.map(jnp.zeros_like, layer), RESIDENT))
        state = engine.decode(model, decoder, state) if plan is None else engine.step(model, decoder, state, plan)
        return _moved(decoder, state, lambda layer: fetch(layer, RESIDENT))

    state = jax.eval_shape(start, weights)
    kind = "loop" if plan is None else decoder.cache.plans[plan].name
    return Case(name=f"{size.model} {method} {kind}", function=run, args=(weights, state), donate=(1,))


RESIDENT = "pinned_host"


def _decoder(method: str, size: Size) -> Decoder:
    """The method with the case's settings."""
    values = decoders.METHODS[method].parsed(dict(size.settings))
    return decoders.METHODS[method].build(**{"gen_length": size.gen, "block_length": size.block} | values)


def _moved(decoder: Decoder, state: DecodeState, move: Callable[[Stored], Stored]) -> DecodeState:
    """The state with its host arrays moved: a device that is not here takes and gives none, so that they are made from nothing
    in the program and fetched at its end."""
    if getattr(decoder.cache, "residency", "device") == "device":
        return state
    layers = tuple(layer._replace(hidden=move(layer.hidden)) for layer in state.cache.layers)
    return state.replace(cache=state.cache._replace(layers=layers))
