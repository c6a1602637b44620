"""What a run of the Polestar reference is told, and what it tells."""

from __future__ import annotations

import dataclasses

import numpy as np

FULL_ENTRY, LOCAL_ENTRY, STEP, REFRESH = range(4)
BY_CONFIDENCE, BY_FALLBACK, BY_DRIFT, BY_SUFFIX = range(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Every choice of a run; the defaults are the paper's.

    Windows are in tokens, None for two blocks before and one after. ``top_clusters_last`` 0 means as ``top_clusters``.
    ``refresh_step``, ``refresh_cumulative`` and ``early_max_delta`` None mean infinity.

    ``full_pattern``, ``kmeans`` and ``inclusive_gate`` are for what only the released program does. ``full_pattern``
    "first" enters fully where block % full_period is 0, "all_but_last" where it is not full_period - 1 (period 1:
    always, in both). ``kmeans`` "release" reserves a cluster for an absent suffix, gives an empty cluster its initial
    row again and ranks it by its drift like any other. ``inclusive_gate`` commits at equality with the drift gate. (The
    release also clamps threshold less confidence at 0; where that matters confidence has committed already.)

    ``eager_fallback`` is in neither preset: the most confident position is committed whenever confidence alone commits
    none, whatever the drift gate adds. Recorded runs of the release name their reasons that way.
    """

    gen_length: int = 256
    block_length: int = 32
    window_prefix: int | None = None
    window_suffix: int | None = None
    clusters: int = 8
    top_clusters: int = 4
    top_clusters_last: int = 0
    tau_static: float = 0.9
    tau_suffix: float = 0.9
    alpha: float = 10.0
    history: int = 5
    refresh_step: float | None = 3
    refresh_cumulative: float | None = 3
    full_period: int = 2
    quantization: str = "nvfp4"
    current_commit: bool = True
    suffix_commit: bool = True
    refresh: bool = True
    early_min_confidence: float = 0.0
    early_max_delta: float | None = None
    exclude_mask: bool = True
    count_eos: bool = False
    kmeans_iterations: int = 5
    patch_committed: bool = False
    full_pattern: str = "first"
    kmeans: str = "paper"
    inclusive_gate: bool = False
    eager_fallback: bool = False


PAPER = Settings()
RELEASE = Settings(
    top_clusters_last=1,
    refresh_step=1,
    refresh_cumulative=2,
    full_period=4,
    quantization="none",
    early_min_confidence=0.7,
    early_max_delta=2.0,
    exclude_mask=False,
    count_eos=True,
    full_pattern="all_but_last",
    kmeans="release",
    inclusive_gate=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: T passes, G generated positions, L layers, K clusters, S = prompt + G.

    tokens int [T, G] after each pass; block, kind int [T] (0 full entry, 1 local entry, 2 step, 3 refresh step);
    confidence, predicted [T, G] for the pass's block (NaN, -1 elsewhere), masked or not; drift, delta [T, G] (NaN but
    for the block of a step); cluster_drift [T, L, K] (NaN but for refresh steps, -inf for a cluster that is not
    ranked); cluster_selected bool [T, L, K]; token_selected bool [T, L, S]; labels int [T, L, S] (-1 outside the
    window and at steps); centroids [T, L, K, D] (NaN but for entries); reason, step int [G]; margins: for each sort
    of decision the smallest distance to its boundary.
    """

    tokens: np.ndarray
    block: np.ndarray
    kind: np.ndarray
    confidence: np.ndarray
    predicted: np.ndarray
    drift: np.ndarray
    delta: np.ndarray
    cluster_drift: np.ndarray
    cluster_selected: np.ndarray
    token_selected: np.ndarray
    labels: np.ndarray
    centroids: np.ndarray
    reason: np.ndarray
    step: np.ndarray
    margins: dict[str, float]

    @property
    def nfe(self) -> int:
        """Forward passes, entries and steps."""
        return len(self.kind)

    @property
    def full_forwards(self) -> int:
        """Block entries over the whole sequence."""
        return int((self.kind == FULL_ENTRY).sum())

    @property
    def refreshes(self) -> int:
        """Steps that refreshed the window."""
        return int((self.kind == REFRESH).sum())

    @property
    def margin(self) -> float:
        """The smallest distance of any decision to its boundary."""
        return min(self.margins.values())
