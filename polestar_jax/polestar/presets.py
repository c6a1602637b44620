"""Polestar's settings: names, accepted values and meaning, and the two presets (specification 6, paper Table 5)."""

from __future__ import annotations

from typing import Any

from polestar_jax.polestar.clusters import KINDS
from polestar_jax.polestar.residency import RESIDENCIES
from polestar_jax.polestar.residuals import GROUPS
from polestar_jax.settings import Setting

PATTERNS = ("first", "all_but_last")
LONGEST_WINDOW = 1 << 17  # rows; longer than any canvas
# Defaults are those of the preset "paper".
SETTINGS = {
    "preset": Setting(
        type=str, default="paper", choices=("paper", "release"),
        help="where the defaults come from: the paper, or its authors' public release where that differs",
    ),
    "tau_static": Setting(type=float, default=0.9, low=0, help="commit what is more confident than this; above 1: nothing"),
    "current_commit": Setting(type=bool, default=True, help="commit in the block by drift, too (current-block commit)"),
    "alpha": Setting(type=float, default=10.0, low=0, help="drift bound: alpha (tau_static - confidence)^2 above the history"),
    "history": Setting(type=int, default=5, low=0, high=1024, help="past drifts of a position to compare with; 0: none"),
    "early_min_confidence": Setting(type=float, default=0.0, low=0, high=1, help="commit by drift only above this confidence"),
    "early_max_delta": Setting(type=float, default=None, low=0, help="and only below this rise; none: no bound"),
    "inclusive_gate": Setting(type=bool, default=False, help="a rise of exactly the bound is enough"),
    "eager_fallback": Setting(
        type=bool, default=False, help="commit the most confident token whenever confidence commits none, beside those by drift"
    ),
    "suffix_commit": Setting(type=bool, default=True, help="commit tokens behind the block that a refresh recomputed"),
    "tau_suffix": Setting(type=float, default=0.9, low=0, help="commit those above this confidence"),
    "window_prefix": Setting(
        type=int, default=None, low=0, high=LONGEST_WINDOW, help="rows of the window before the block; none: two blocks"
    ),
    "window_suffix": Setting(
        type=int, default=None, low=0, high=LONGEST_WINDOW, help="rows of the window after the block; none: one block"
    ),
    "clusters": Setting(type=int, default=8, low=2, high=1024, help="clusters K of the window's rows"),
    "top_clusters": Setting(type=int, default=4, low=1, help="clusters k that a layer recomputes at a refresh"),
    "top_clusters_last": Setting(type=int, default=None, low=1, help="the same at the last layer; none: top_clusters"),
    "kmeans_iterations": Setting(type=int, default=5, low=1, high=1000, help="rounds of the clustering"),
    "kmeans": Setting(
        type=str, default="paper", choices=KINDS,
        help="release: empty clusters start again and can be selected, one is kept back for an absent suffix",
    ),
    "refresh": Setting(type=bool, default=True, help="refresh the cache at all"),
    "refresh_step": Setting(type=int, default=3, low=-1, none="never", help="refresh when one pass committed more tokens"),
    "refresh_cumulative": Setting(
        type=int, default=3, low=-1, none="never", help="refresh when more were committed since the last refresh"
    ),
    "count_eos": Setting(type=bool, default=False, help="whether end-of-text tokens count for that"),
    "full_period": Setting(type=int, default=2, low=1, help="every how many blocks every row is recomputed at the entry"),
    "full_pattern": Setting(
        type=str, default="first", choices=PATTERNS, help="which of a period: the first, or all but the last (of one: that)"
    ),
    "quantization": Setting(type=str, default="nvfp4", choices=tuple(GROUPS), help="how window states are stored (Table 11)"),
    "patch_committed": Setting(
        type=bool, default=False, help="a refresh gives the first layer the embeddings of tokens committed early"
    ),
    "residency": Setting(
        type=str, default="device", choices=RESIDENCIES,
        help="where stored window states stay between passes; pinned_host: in host memory, fetched layer by layer",
    ),
    "packet_capacity": Setting(
        type=int, default=None, low=1, help="compute this many window rows at a refresh where they hold those selected; none: all"
    ),
}  # fmt: skip
RELEASE: dict[str, Any] = {
    "early_min_confidence": 0.7,
    "early_max_delta": 2.0,
    "inclusive_gate": True,
    # Not in the specification: recorded runs name their reasons so, and one commits by drift and by fallback in one pass.
    "eager_fallback": True,
    "top_clusters_last": 1,
    "kmeans": "release",
    "refresh_step": 1,
    "refresh_cumulative": 2,
    "count_eos": True,
    "full_period": 4,
    "full_pattern": "all_but_last",
    "quantization": "none",
    "exclude_mask": False,
}
