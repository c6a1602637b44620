"""Which checkpoint tensors make up which weight of the denoiser, as data.

Names are full paths: in LLaDA the output head and every layer's down projection share the leaf name ``ff_out``, so
matching by suffix would map one onto the other. Everything else in ``convert`` walks :func:`pieces`.

Shape letters: d width, h query heads, g key/value heads, e head dim, f MLP width, v vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from polestar_jax.spec import Family, ModelSpec

Kind = Literal["copy", "transpose", "qkv", "qkv_bias", "out", "gate_up"]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One checkpoint tensor: its full name and its shape in the file (matrices are [out, in])."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One weight of the denoiser.

    Attributes:
      path: its key in the denoiser's flat state.
      shape: its shape there.
      kind: how the sources are laid into it (:mod:`convert.fuse`).
      sources: the checkpoint tensors it is made of, in order.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    kind: Kind
    sources: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is converted, written and restored in one go: the embedding, one layer, or the final norm and head."""

    name: str
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of one family; ``layer`` is a prefix with the layer number to fill in."""

    embedding: str
    norm: str
    head: str
    layer: str
    attn_norm: str
    mlp_norm: str
    q: str
    k: str
    v: str
    out: str
    gate: str
    up: str
    down: str


NAMES: dict[Family, Names] = {
    "llada": Names(
        embedding="model.transformer.wte.weight",
        norm="model.transformer.ln_f.weight",
        head="model.transformer.ff_out.weight",
        layer="model.transformer.blocks.{}.",
        attn_norm="attn_norm.weight",
        mlp_norm="ff_norm.weight",
        q="q_proj",
        k="k_proj",
        v="v_proj",
        out="attn_out.weight",
        gate="ff_proj.weight",
        up="up_proj.weight",
        down="ff_out.weight",
    ),
    "dream": Names(
        embedding="model.embed_tokens.weight",
        norm="model.norm.weight",
        head="lm_head.weight",
        layer="model.layers.{}.",
        attn_norm="input_layernorm.weight",
        mlp_norm="post_attention_layernorm.weight",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        out="self_attn.o_proj.weight",
        gate="mlp.gate_proj.weight",
        up="mlp.up_proj.weight",
        down="mlp.down_proj.weight",
    ),
}

_MARKS: dict[str, str] = {
    "model.transformer.": "the LLaDA text model",
    "model.layers.": "Dream",
    "model.vision_tower.": "LLaDA-V",
    "model.mm_projector.": "LLaDA-V",
    "blk.": "GGUF files",
}
_OWN_MARK: dict[Family, str] = {"llada": "model.transformer.", "dream": "model.layers."}


def canonical(name: str, family: Family) -> str:
    """The full name of a tensor; some LLaDA repositories leave out the leading ``model.``."""
    return "model." + name if family == "llada" and name.startswith("transformer.") else name


def foreign_name(names: list[str], family: Family) -> tuple[str, str] | None:
    """The first tensor name that is typical of another kind of model, with that kind; None where there is none."""
    for mark, kind in _MARKS.items():
        if mark != _OWN_MARK[family]:
            for name in names:
                if name.startswith(mark):
                    return name, kind
    return None


def layer_piece(index: int) -> str:
    """The name of a layer's piece."""
    return f"layer_{index:03d}"


@functools.lru_cache(maxsize=8)
def pieces(spec: ModelSpec) -> tuple[Piece, ...]:
    """Every weight of the model in the order of the forward pass."""
    names, d, v = NAMES[spec.family], spec.d_model, spec.vocab_size
    embedding = Slot(("embedding",), (v, d), "copy", (Tensor(names.embedding, (v, d)),))
    norm = Slot(("norm", "weight"), (d,), "copy", (Tensor(names.norm, (d,)),))
    head = Slot(("head",), (d, v), "transpose", (Tensor(names.head, (v, d)),))
    layers = [Piece(layer_piece(i), _layer_slots(spec, i)) for i in range(spec.n_layers)]
    return (Piece("embedding", (embedding,)), *layers, Piece("head", (norm, head)))


def _layer_slots(spec: ModelSpec, index: int) -> tuple[Slot, ...]:
    names, prefix = NAMES[spec.family], NAMES[spec.family].layer.format(index)
    d, h, g, q, e, f = spec.d_model, spec.n_heads, spec.n_kv_heads, spec.n_groups, spec.head_dim, spec.d_ff
    widths = {names.q: h * e, names.k: g * e, names.v: g * e}

    def slot(key: tuple[str, ...], shape: tuple[int, ...], kind: Kind, *sources: Tensor) -> Slot:
        full = tuple(dataclasses.replace(source, name=prefix + source.name) for source in sources)
        return Slot(("layers", index, *key), shape, kind, full)

    weights = [Tensor(f"{name}.weight", (width, d)) for name, width in widths.items()]
    slots = [
        slot(("attn_norm", "weight"), (d,), "copy", Tensor(names.attn_norm, (d,))),
        slot(("qkv",), (d, g, q + 2, e), "qkv", *weights),
        slot(("out",), (h, e, d), "out", Tensor(names.out, (d, h * e))),
        slot(("mlp_norm", "weight"), (d,), "copy", Tensor(names.mlp_norm, (d,))),
        slot(("gate_up",), (d, 2, f), "gate_up", Tensor(names.gate, (f, d)), Tensor(names.up, (f, d))),
        slot(("down",), (f, d), "transpose", Tensor(names.down, (d, f))),
    ]
    if spec.qkv_bias:
        biases = [Tensor(f"{name}.bias", (width,)) for name, width in widths.items()]
        slots.insert(2, slot(("qkv_bias",), (g, q + 2, e), "qkv_bias", *biases))
    return tuple(slots)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a checkpoint of this spec holds, in the order of the forward pass."""
    return {tensor.name: tensor.shape for piece in pieces(spec) for slot in piece.slots for tensor in slot.sources}
