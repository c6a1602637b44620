"""What a checkpoint is, as one frozen, hashable value.

LLaDA and Dream share one denoiser; everything that tells them apart is data in :class:`ModelSpec`. Reading a
``config.json`` into a spec is :mod:`polestar_jax.config`'s job.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

Family = Literal["llada", "dream"]


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
    def from_json(cls, text: str) -> ModelSpec:
        values = json.loads(text)
        values["stop_ids"] = tuple(values["stop_ids"])
        return cls(**values)
