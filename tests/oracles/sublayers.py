"""The passes of dLLM-Cache and Dynamic-dLLM in NumPy, from their specification: one sequence, lists of rows, all in float64.

Nothing is left out here: the whole canvas has a residual stream, its first layer is computed in every pass, and the outputs of
attention and MLP are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracles.numpy_model import Reference, attention, rms_norm, rotate

Pick = Callable[[int, np.ndarray], list[int]]


class Passes:
    """A sequence's passes, one after the other.

    Args:
      ref: the model.
      prompt, gen_length: P and G.
      shift: 1 where row i scores position i + 1; the last prompt row is then computed in every pass.
    """

    def __init__(self, ref: Reference, prompt: list[int], gen_length: int, shift: int):
        self.ref, self.shift = ref, shift
        self.p, self.n = len(prompt), len(prompt) + gen_length
        self.layers: list[dict[str, np.ndarray]] = []

    def forward(
        self, tokens: np.ndarray, *, prompt: bool, response: bool, pick: Pick
    ) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
        """Logits of the positions that are generated [G, v]; 1 - cosine of their values and the cached ones at each layer
        [L, G]; and the rows each layer computed.

        Args:
          tokens: [N].
          prompt, response: whether all of the prompt, of the generation is computed.
          pick: the generated rows that a layer computes otherwise, from its number and its distances [G].
        """
        ref, p, n = self.ref, self.p, self.n
        x, moved, computed = ref.embedding[tokens], [], []
        positions = np.arange(n)
        for i, w in enumerate(ref.layers):
            normed = rms_norm(x, w["attn_norm"], ref.eps)
            q, k, v = (normed @ w[name].T + w.get(f"{name}_bias", 0) for name in "qkv")
            if len(self.layers) <= i:
                self.layers.append(
                    {"k": k.copy(), "v": v.copy(), "attention": np.zeros_like(x), "mlp": np.zeros_like(x)}
                )
                moved.append(np.zeros(n - p))
            else:
                moved.append(distance(v[p:], self.layers[i]["v"][p:]))
            here = list(range(p)) if prompt or i == 0 else list(range(p - self.shift, p))
            here += list(range(p, n)) if response or i == 0 else [p + row for row in pick(i, moved[-1])]
            kept = self.layers[i]
            kept["k"][here], kept["v"][here], kept["v"][p:] = k[here], v[here], v[p:]
            turned = rotate(kept["k"].reshape(n, ref.n_kv_heads, -1), positions, ref.theta)
            asked = rotate(q.reshape(n, ref.n_heads, -1), positions, ref.theta)[here]
            if here:
                heads = attention(asked, turned, kept["v"].reshape(n, ref.n_kv_heads, -1), None)
                kept["attention"][here] = heads.reshape(len(here), -1) @ w["out"].T
                middle = rms_norm((x + kept["attention"])[here], w["mlp_norm"], ref.eps)
                gate = middle @ w["gate"].T
                kept["mlp"][here] = gate / (1 + np.exp(-gate)) * (middle @ w["up"].T) @ w["down"].T
            x = x + kept["attention"] + kept["mlp"]
            computed.append(here)
        logits = rms_norm(x, ref.norm, ref.eps) @ ref.head.T
        return logits[p - self.shift : n - self.shift], np.array(moved), computed


def distance(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """1 - cosine of rows [r, c]."""
    return 1 - np.sum(new * old, axis=1) / np.maximum(np.linalg.norm(new, axis=1) * np.linalg.norm(old, axis=1), 1e-30)


def largest(values: np.ndarray, count: int, among: list[int]) -> list[int]:
    """The ``count`` of ``among`` with the largest values, the lowest first of equal ones."""
    return sorted(among, key=lambda i: (-values[i], i))[:count]


def probabilities(logits: np.ndarray, mask_id: int) -> np.ndarray:
    """Softmax [r, v] without the mask token."""
    logits = np.where(np.arange(logits.shape[1]) == mask_id, -np.inf, logits)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)
