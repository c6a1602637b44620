"""What a checkpoint is, as one frozen, hashable value.

LLaDA and Dream share one denoiser; everything that tells them apart is data in :class:`ModelSpec`. Reading a
``config.json`` into a spec is :mod:`polestar_jax.config`'s job.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from polestar_jax.errors import InputError
from polestar_jax.jsonfile import finite_float, parse_json

Family = Literal["llada", "dream"]

# Bounds of sizes read from files: array indices are 32-bit, and layers are listed one by one before weights are seen.
LARGEST, MOST_LAYERS = 2**31 - 1, 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes, constants and special ids of one masked diffusion language model.

    Attributes:
      family: which tensor names, logit shift and chat conventions apply.
      d_model, n_layers, n_heads, n_kv_heads, head_dim, d_ff: sizes.
      vocab_size: rows of the embedding table and of the output head (may exceed the tokenizer's length).
      max_length: longest sequence (prompt and generation) the model was made for, in tokens.
      rope_theta: base of the half-split rotary embedding.
      norm_eps: RMSNorm epsilon.
      qkv_bias: whether q, k and v carry a bias (Dream).
      logit_shift: 0 when row i scores position i (LLaDA), 1 when row i scores position i + 1 (Dream).
      mask_id: the [MASK] token.
      eos_id: end of text; both families pad with it.
      bos_id: start of text, or None.
      stop_ids: ids that end an answer (eos and the end-of-turn marker); not counted as generated tokens.
    """

    family: Family
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    max_length: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    logit_shift: int
    mask_id: int
    eos_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...]

    @property
    def n_groups(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def parameters(self) -> int:
        """Number of weights: table, head, layers and norms."""
        heads = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        layer = self.d_model * (heads + self.n_heads * self.head_dim + 3 * self.d_ff + 2) + self.qkv_bias * heads
        return self.n_layers * layer + (2 * self.vocab_size + 1) * self.d_model

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "spec.json") -> ModelSpec:
        """The spec that :meth:`to_json` wrote.

        Args:
          text: the JSON text.
          source: what to call it in messages, usually its path.

        Raises:
          InputError: a key is missing or unknown, or its value is none this forward pass takes; names key and value.
        """
        values = parse_json(text, source=source)
        for field in dataclasses.fields(cls):
            if field.name not in values:
                raise InputError(f"{source}: key {field.name} is missing; convert the model again")
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise InputError(f"{source}: unknown key {unknown[0]!r}; convert the model again")
        _check_values(values, source)
        for key in ("rope_theta", "norm_eps"):
            values[key] = float(values[key])
        return cls(**values | {"stop_ids": tuple(values["stop_ids"])})


_SIZES = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "max_length")


def _check_values(values: dict[str, Any], source: str) -> None:
    """Types and ranges of a spec's values, in an order in which each check may rely on those before it."""

    def need(good: bool, key: str, accepted: str) -> None:
        if not good:
            raise InputError(f"{source}: {key} is {json.dumps(values[key])}; accepted: {accepted}")

    for key in _SIZES:
        largest = MOST_LAYERS if key == "n_layers" else LARGEST
        need(type(values[key]) is int and 1 <= values[key] <= largest, key, f"a whole number in 1..{largest}")
    n_heads, vocab_size = values["n_heads"], values["vocab_size"]
    need(n_heads % values["n_kv_heads"] == 0, "n_kv_heads", f"a divisor of n_heads, {n_heads}")
    need(values["head_dim"] % 2 == 0, "head_dim", "an even number")
    for key in ("rope_theta", "norm_eps"):
        number = finite_float(values[key])
        need(number is not None and number > 0, key, "a positive number")
    need(values["family"] in ("llada", "dream"), "family", '"llada" or "dream"')
    dream = values["family"] == "dream"
    need(values["qkv_bias"] is dream, "qkv_bias", f"{json.dumps(dream)} ({values['family']})")
    shift = values["logit_shift"]
    need(type(shift) is int and shift == int(dream), "logit_shift", f"{int(dream)} ({values['family']})")

    def is_id(value: object) -> bool:
        return type(value) is int and 0 <= value < vocab_size

    ids = f"a token id in 0..{vocab_size - 1}"
    for key in ("mask_id", "eos_id"):
        need(is_id(values[key]), key, ids)
    need(values["mask_id"] != values["eos_id"], "mask_id", f"{ids} other than eos_id")
    need(values["bos_id"] is None or is_id(values["bos_id"]), "bos_id", f"{ids}, or null")
    stops = values["stop_ids"]
    listed = isinstance(stops, list) and bool(stops) and all(map(is_id, stops))
    need(
        listed and values["mask_id"] not in stops,
        "stop_ids",
        f"a list of at least one id in 0..{vocab_size - 1}, no mask_id",
    )
