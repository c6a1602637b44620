"""Polestar decoding in plain NumPy, float64, one sequence: what the package's decoder is held against.

Dynamic shapes, one pass after another, separate products for block rows, centroids and packets, greedy decoding
(temperature 0). Written from the method's description alone. Words used below: the window is the rows around the
active block, prefix part first; a packet is a set of window rows with their outputs of the layer before.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracles import polestar_parts as parts
from tests.oracles.numpy_model import Reference, rms_norm, rotate
from tests.oracles.polestar_settings import (
    BY_CONFIDENCE,
    BY_DRIFT,
    BY_FALLBACK,
    BY_SUFFIX,
    FULL_ENTRY,
    LOCAL_ENTRY,
    PAPER,
    REFRESH,
    RELEASE,
    STEP,
    Run,
    Settings,
)

__all__ = ["PAPER", "RELEASE", "Decoding", "Run", "Settings", "decode"]


class Decoding:
    """The state of one run, and the passes that move it on."""

    def __init__(
        self, reference: Reference, prompt: np.ndarray, settings: Settings, mask_id: int, eos_id: int, shift: int
    ):
        b = settings.block_length
        if settings.gen_length % b or settings.clusters < 2 or (shift and not len(prompt)):
            raise ValueError("needs whole blocks, two clusters or more and, with shifted logits, a prompt")
        self.set, self.mask_id, self.eos_id, self.shift = settings, mask_id, eos_id, shift
        self.ref = reference
        self.layers = [{k: v.astype(np.float64) for k, v in w.items()} for w in reference.layers]
        self.embedding, self.norm, self.head = (
            a.astype(np.float64) for a in (reference.embedding, reference.norm, reference.head)
        )
        self.n_prompt, self.total = len(prompt), len(prompt) + settings.gen_length
        self.prefix = 2 * b if settings.window_prefix is None else settings.window_prefix
        self.suffix = b if settings.window_suffix is None else settings.window_suffix
        self.tokens = np.concatenate([prompt, np.full(settings.gen_length, mask_id)]).astype(int)
        n, head_width = len(self.layers), len(self.layers[0]["q"]) // reference.n_heads
        self.keys = np.zeros((n, self.total, reference.n_kv_heads, head_width))  # before rotation
        self.values = np.zeros_like(self.keys)
        self.hidden, self.centroids, self.labels, self.counts, self.ranked, self.proxies = (
            [None] * n for _ in range(6)
        )
        self.reason, self.step_of = (np.full(settings.gen_length, -1) for _ in range(2))
        self.margins = {
            name: math.inf for name in ("threshold", "gate", "band", "ranking", "suffix", "fallback", "argmax")
        }
        self.passes: list[dict] = []

    # ---- one layer's arithmetic ----

    def project(self, layer: int, x: np.ndarray, which: str) -> np.ndarray:
        """q, k or v of rows x [n, d] entering a layer, heads apart and not rotated: [n, heads, e]."""
        w = self.layers[layer]
        out = rms_norm(x, w["attn_norm"], self.ref.eps) @ w[which].T + w.get(f"{which}_bias", 0.0)
        return out.reshape(len(x), self.ref.n_heads if which == "q" else self.ref.n_kv_heads, self.keys.shape[-1])

    def write(self, layer: int, rows: np.ndarray, x: np.ndarray) -> None:
        """Keys and values of rows x into the cache."""
        self.keys[layer][rows] = self.project(layer, x, "k")
        self.values[layer][rows] = self.project(layer, x, "v")

    def weights(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Attention [h, n, s] of q [n, h, e] over k [s, g, e], as they are."""
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        return parts.softmax(np.einsum("nhe,she->hns", q, k) / math.sqrt(q.shape[-1]))

    def run_layer(self, layer: int, rows: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows x at their positions against the whole cache: output [n, d] and attention [h, n, s]."""
        w, everywhere = self.layers[layer], np.arange(self.total)
        q = rotate(self.project(layer, x, "q"), rows, self.ref.theta)
        attention = self.weights(q, rotate(self.keys[layer], everywhere, self.ref.theta))
        v = np.repeat(self.values[layer], self.ref.n_heads // self.ref.n_kv_heads, axis=1)
        x = x + np.einsum("hns,she->nhe", attention, v).reshape(len(x), w["out"].shape[1]) @ w["out"].T
        normed = rms_norm(x, w["mlp_norm"], self.ref.eps)
        gate = normed @ w["gate"].T
        return x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T, attention

    def proxy(self, layer: int) -> np.ndarray:
        """Attention [h, K, s] of the centroids over the cache as it stands, no rotation on either side."""
        return self.weights(self.project(layer, self.centroids[layer], "q"), self.keys[layer])

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """From final rows x [n, d]: confidence [n], predicted id [n], and its lead over the next best [n]."""
        logits = rms_norm(x, self.norm, self.ref.eps) @ self.head.T
        if self.set.exclude_mask:
            logits[:, self.mask_id] = -np.inf
        p = parts.softmax(logits)
        best = np.sort(p, axis=-1)
        return p.max(axis=-1), p.argmax(axis=-1), best[:, -1] - best[:, -2]

    # ---- a block ----

    def run(self) -> Run:
        """Every block in turn."""
        for block in range(self.set.gen_length // self.set.block_length):
            self.start = self.n_prompt + block * self.set.block_length
            self.end = self.start + self.set.block_length
            if self.masked().any():
                self.enter(block)
                while self.masked().any():
                    self.step(block)
        stacked = {name: np.stack([record[name] for record in self.passes]) for name in self.passes[0]}
        return Run(**stacked, reason=self.reason, step=self.step_of, margins=self.margins)

    def masked(self) -> np.ndarray:
        """Which positions of the block are undecided, bool [B]."""
        return self.tokens[self.start : self.end] == self.mask_id

    def is_full(self, block: int) -> bool:
        """Whether the entry of a block computes the whole sequence."""
        period = self.set.full_period
        if self.set.full_pattern == "first" or period == 1:
            return block % period == 0
        return block % period != period - 1

    def enter(self, block: int) -> None:
        """The block's first pass: caches, clusters, proxy attention and the block's attention are taken anew."""
        self.new_record(block, FULL_ENTRY if self.is_full(block) else LOCAL_ENTRY)
        before = np.arange(max(0, self.start - self.prefix), self.start)
        after = np.arange(self.end, min(self.total, self.end + self.suffix))
        self.window = np.concatenate([before, after])
        self.entry_tokens = self.tokens.copy()
        active = np.arange(self.start - self.shift, self.end)
        rows = np.arange(self.total) if self.is_full(block) else np.union1d(self.window, active)
        x = self.embedding[self.tokens[rows]]
        for layer in range(len(self.layers)):
            self.cluster(layer, x[np.searchsorted(rows, self.window)], len(before))
            self.write(layer, rows, x)
            self.proxies[layer] = self.proxy(layer)
            x, attention = self.run_layer(layer, rows, x)
        block_rows = np.arange(self.start, self.end)
        self.attention = attention[:, np.searchsorted(rows, block_rows)]
        self.history: list[np.ndarray] = []
        self.cumulative = 0
        self.commit(x[np.searchsorted(rows, block_rows - self.shift)], None)

    def cluster(self, layer: int, rows: np.ndarray, prefix_rows: int) -> None:
        """Centroids, labels, counts and the stored form of the window rows entering a layer."""
        release = self.set.kmeans == "release"
        z, m, exists = parts.cluster_window(
            rows, prefix_rows, self.set.clusters, self.set.kmeans_iterations, release=release
        )
        self.centroids[layer], self.labels[layer] = z, m
        self.counts[layer] = np.bincount(m, minlength=self.set.clusters)
        self.ranked[layer] = exists if release else self.counts[layer] > 0
        self.hidden[layer] = parts.store(rows, z, m, self.set.quantization)
        self.record["labels"][layer, self.window] = m
        self.record["centroids"][layer] = np.where(exists[:, None], z, np.nan)

    def step(self, block: int) -> None:
        """A pass over the block's rows, with or without a refresh of the window."""
        once, together = (
            math.inf if limit is None else limit for limit in (self.set.refresh_step, self.set.refresh_cumulative)
        )
        self.cumulative += self.last_commits
        refresh = self.set.refresh and (self.last_commits > once or self.cumulative > together)
        if refresh:
            self.cumulative = 0
        self.new_record(block, REFRESH if refresh else STEP)
        rows = np.arange(self.start - self.shift, self.end)
        x = self.embedding[self.tokens[rows]]
        packet = self.committed_packet() if refresh and self.set.patch_committed else None
        for layer in range(len(self.layers)):
            if refresh and packet is not None:
                self.patch(layer, *packet)
            self.write(layer, rows, x)
            x, attention = self.run_layer(layer, rows, x)
            if refresh:
                packet = self.refresh(layer)
        attention = attention[:, self.shift :]
        drift = parts.kl(attention, self.attention)
        self.attention = attention
        delta = drift - (np.mean(self.history, axis=0) if self.history else 0.0)
        self.history = [*self.history, drift][-self.set.history :] if self.set.history else []
        here = slice(self.start - self.n_prompt, self.end - self.n_prompt)
        self.record["drift"][here], self.record["delta"][here] = drift, delta
        suffix = packet if refresh and self.set.suffix_commit else None
        self.commit(x[: self.set.block_length], delta, suffix)

    def committed_packet(self) -> tuple[np.ndarray, np.ndarray]:
        """For layer 0: the window rows decided since the block was entered, with their embeddings."""
        index = np.flatnonzero(self.tokens[self.window] != self.entry_tokens[self.window])
        return index, self.embedding[self.tokens[self.window[index]]]

    def patch(self, layer: int, index: np.ndarray, u: np.ndarray) -> None:
        """A packet (window row numbers, rows [n, d]) into hidden states, cache and centroids."""
        change = u - self.hidden[layer][index]
        self.hidden[layer][index] = u
        self.write(layer, self.window[index], u)
        for row, label in zip(change, self.labels[layer][index], strict=True):
            self.centroids[layer][label] += row / self.counts[layer][label]

    def refresh(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Ranks the clusters by proxy drift, recomputes the rows of the first few: the next layer's packet."""
        new = self.proxy(layer)
        drift = np.where(self.ranked[layer], parts.kl(new, self.proxies[layer]), -np.inf)
        self.proxies[layer] = new
        last = layer == len(self.layers) - 1
        count = (self.set.top_clusters_last if last else 0) or self.set.top_clusters
        chosen = parts.top_clusters(drift, count)
        self.note_ranking(drift, chosen)
        index = np.flatnonzero(np.isin(self.labels[layer], chosen))
        u, _ = self.run_layer(layer, self.window[index], self.hidden[layer][index])
        self.hidden[layer] = parts.store(
            self.hidden[layer], self.centroids[layer], self.labels[layer], self.set.quantization
        )
        self.record["cluster_drift"][layer] = drift
        self.record["cluster_selected"][layer, chosen] = True
        self.record["token_selected"][layer, self.window[index]] = True
        return index, u

    # ---- commits ----

    def commit(self, x: np.ndarray, delta: np.ndarray | None, packet: tuple | None = None) -> None:
        """Decides positions of the block from its final rows x [B, d] (delta None: an entry), then of the suffix."""
        confidence, predicted, lead = self.predict(x)
        masked = self.masked()
        sure = masked & (confidence > self.set.tau_static)
        self.note("threshold", np.abs(confidence - self.set.tau_static)[masked])
        drifted = np.zeros_like(masked)
        if delta is not None and self.set.current_commit:
            drifted = self.drift_commits(masked & ~sure, confidence, delta)
        chosen, reason = sure | drifted, np.where(sure, BY_CONFIDENCE, BY_DRIFT)
        if not (sure if self.set.eager_fallback else chosen).any():
            order = np.where(masked, confidence, -1.0)
            best = order.argmax()
            chosen[best], reason[best] = True, BY_FALLBACK
            self.note("fallback", order[best] - np.delete(order, best))
        self.note("argmax", lead[chosen])
        here = slice(self.start - self.n_prompt, self.end - self.n_prompt)
        self.record["confidence"][here], self.record["predicted"][here] = confidence, predicted
        self.decide(np.flatnonzero(chosen) + self.start, predicted[chosen], reason[chosen])
        counted = chosen if self.set.count_eos else chosen & (predicted != self.eos_id)
        self.last_commits = int(counted.sum())
        if packet is not None and len(packet[0]):
            self.suffix_commits(*packet)
        self.record["tokens"] = self.tokens[self.n_prompt :].copy()

    def drift_commits(self, open_: np.ndarray, confidence: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """Which open positions the drift gate commits."""
        highest = math.inf if self.set.early_max_delta is None else self.set.early_max_delta
        gate = self.set.alpha * (self.set.tau_static - confidence) ** 2
        passed = delta >= gate if self.set.inclusive_gate else delta > gate
        inside = (confidence > self.set.early_min_confidence) & (delta < highest)
        self.note("gate", np.abs(delta - gate)[open_ & inside])
        self.note("band", np.abs(confidence - self.set.early_min_confidence)[open_ & passed & (delta < highest)])
        return open_ & passed & inside

    def suffix_commits(self, index: np.ndarray, u: np.ndarray) -> None:
        """Positions after the block that the last layer's packet decides."""
        targets = self.window[index] + self.shift
        confidence, predicted, lead = self.predict(u)
        open_ = (targets >= self.end) & (targets < self.total)
        open_[open_] = self.tokens[targets[open_]] == self.mask_id
        chosen = open_ & (confidence > self.set.tau_suffix)
        self.note("suffix", np.abs(confidence - self.set.tau_suffix)[open_])
        self.note("argmax", lead[chosen])
        self.decide(targets[chosen], predicted[chosen], np.full(chosen.sum(), BY_SUFFIX))

    def decide(self, positions: np.ndarray, tokens: np.ndarray, reason: np.ndarray) -> None:
        """Writes tokens for good, with the reason and the number of this pass."""
        self.tokens[positions] = tokens
        self.reason[positions - self.n_prompt] = reason
        self.step_of[positions - self.n_prompt] = len(self.passes) - 1

    # ---- records ----

    def note(self, name: str, distances: np.ndarray) -> None:
        """Keeps the smallest distance to a boundary."""
        self.margins[name] = min([self.margins[name], *map(float, distances)])

    def note_ranking(self, drift: np.ndarray, chosen: list[int]) -> None:
        """The gap between the last selected cluster and the first that was not, ties apart."""
        ranked = np.flatnonzero(np.isfinite(drift))
        taken = [drift[c] for c in ranked if c in chosen]
        left = [drift[c] for c in ranked if c not in chosen]
        if taken and left and min(taken) - max(left) > parts.DRIFT_TIE:
            self.note("ranking", np.array([min(taken) - max(left)]))

    def new_record(self, block: int, kind: int) -> None:
        """An empty record of a pass, filled as it goes."""
        g, n, k, s = self.set.gen_length, len(self.layers), self.set.clusters, self.total
        self.record = {"block": block, "kind": kind, "predicted": np.full(g, -1)}
        self.record |= {name: np.full(g, np.nan) for name in ("confidence", "drift", "delta")}
        self.record |= {"cluster_drift": np.full((n, k), np.nan), "cluster_selected": np.zeros((n, k), bool)}
        self.record |= {"token_selected": np.zeros((n, s), bool), "labels": np.full((n, s), -1)}
        self.record["centroids"] = np.full((n, k, self.embedding.shape[1]), np.nan)
        self.passes.append(self.record)


def decode(
    reference: Reference, prompt_ids: np.ndarray, settings: Settings, *, mask_id: int, eos_id: int, logit_shift: int
) -> Run:
    """A whole greedy run.

    Args:
      reference: the checkpoint.
      prompt_ids: int [P].
      settings: :data:`PAPER`, :data:`RELEASE` or changes of them.
      mask_id: the id of an undecided position.
      eos_id: the one id that ``count_eos`` is about.
      logit_shift: 0 where row i predicts position i, 1 where it predicts i + 1 (then P must be at least 1).
    """
    return Decoding(reference, np.asarray(prompt_ids), settings, mask_id, eos_id, logit_shift).run()
