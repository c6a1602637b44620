"""Decoding with cached keys and values in plain NumPy, float64, one sequence: what cache policies and schedules are held
against. Rows are lists of positions, nothing is padded, and a method is a few functions of a :class:`Run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from tests.oracles.numpy_model import attention, of_denoiser, rms_norm, rotate


@dataclasses.dataclass
class Guess:
    """What a row says about the position that it scores."""

    token: int
    confidence: float
    entropy: float


class Run:
    """One sequence while it is decoded: tokens, cached keys and values, the span, and when each position was committed."""

    def __init__(self, model, prompt: list[int], gen_length: int):
        self.ref, self.spec = of_denoiser(model), model.spec
        self.p, self.g, self.shift = len(prompt), gen_length, model.spec.logit_shift
        self.tokens = np.array([*prompt, *[self.spec.mask_id] * gen_length])
        n, heads = len(self.tokens), self.ref.n_kv_heads
        self.keys = [np.zeros((n, heads, self.spec.head_dim)) for _ in self.ref.layers]  # rotated
        self.values = [np.zeros_like(keys) for keys in self.keys]
        self.committed_at = np.full(gen_length, -1)
        self.nfe = self.span_passes = self.rows = self.full = 0
        self.start = self.end = 0
        self.last_entropy = np.inf
        self.visible = np.ones(n, bool)
        self.history: list[list[int]] = []

    @property
    def undecided(self) -> list[int]:
        return [i for i in range(self.g) if self.committed_at[i] < 0]

    def forward(self, rows: list[int]) -> dict[int, Guess]:
        """Compute these rows; what they say about undecided positions, by position."""
        ref, rows = self.ref, sorted(set(rows))
        at = np.array(rows)
        x = ref.embedding[self.tokens[at]]
        for i, w in enumerate(ref.layers):
            normed = rms_norm(x, w["attn_norm"], ref.eps)
            q, k, v = (normed @ w[name].T + w.get(f"{name}_bias", 0) for name in "qkv")
            q = rotate(q.reshape(len(at), ref.n_heads, -1), at, ref.theta)
            self.keys[i][at] = rotate(k.reshape(len(at), ref.n_kv_heads, -1), at, ref.theta)
            self.values[i][at] = v.reshape(len(at), ref.n_kv_heads, -1)
            x = x + attention(q, self.keys[i], self.values[i], self.visible).reshape(len(at), -1) @ w["out"].T
            normed = rms_norm(x, w["mlp_norm"], ref.eps)
            gate = normed @ w["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T
        logits = rms_norm(x, ref.norm, ref.eps) @ ref.head.T
        logits[:, self.spec.mask_id] = -np.inf
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        self.rows += len(rows)
        self.full += len(rows) == len(self.tokens)
        guesses = {}
        for row, probabilities in zip(rows, p, strict=True):
            position = row - self.p + self.shift
            if 0 <= position < self.g and self.committed_at[position] < 0:
                entropy = -sum(x * np.log(x) for x in probabilities if x > 0)
                guesses[position] = Guess(int(probabilities.argmax()), float(probabilities.max()), float(entropy))
        return guesses

    def commit(self, positions: list[int], guesses: dict[int, Guess]) -> None:
        for position in positions:
            self.tokens[self.p + position] = guesses[position].token
            self.committed_at[position] = self.nfe
        self.last_entropy = max(guesses[position].entropy for position in positions)
        self.nfe += 1
        self.span_passes += 1
        self.history.append(self.tokens[self.p :].tolist())


def above(threshold: float) -> Callable[[Run, dict[int, Guess]], list[int]]:
    """Those of at least this confidence, else the best one."""

    def rule(run: Run, guesses: dict[int, Guess]) -> list[int]:
        sure = [i for i, guess in guesses.items() if guess.confidence >= threshold]
        return sure or one(run, guesses)

    return rule


def one(run: Run, guesses: dict[int, Guess]) -> list[int]:
    """The most confident one."""
    return [max(sorted(guesses), key=lambda i: guesses[i].confidence)]


def decode(
    model,
    prompt: list[int],
    gen_length: int,
    *,
    block: int,
    rows: Callable[[Run], list[int] | None],
    rule: Callable[[Run, dict[int, Guess]], list[int]],
    longest: int | None = None,
    cut: Callable[[Run, dict[int, Guess]], int] | None = None,
    enter: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Decode a prompt.

    Args:
      model, prompt, gen_length: of one sequence.
      block: positions of a span; with ``longest``, spans start at the first undecided position and have that many until cut.
      rows: the positions that a pass computes, None for all.
      rule: which of the span's guesses are committed.
      cut: the end of the span from the guesses of its entry.
      enter: called before a span's first pass.
    """
    run = Run(model, prompt, gen_length)
    while run.undecided:
        first = run.undecided[0]
        if longest is None:
            start, end = first // block * block, first // block * block + block
        else:
            start, end = first, min(first + longest, gen_length)
        run.start, run.end, run.span_passes = start, end, 0
        enter(run)
        while any(start <= i < run.end for i in run.undecided):
            chosen = rows(run)
            guesses = run.forward(list(range(len(run.tokens))) if chosen is None else chosen)
            if run.span_passes == 0 and cut is not None:
                run.end = cut(run, guesses)
            inside = {i: guess for i, guess in guesses.items() if run.start <= i < run.end}
            run.commit(rule(run, inside), guesses)
    return run
