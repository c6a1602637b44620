"""The NumPy reference of Polestar decoding, itself held against recorded runs of independent programs.

``*_paper_*`` were recorded from a float64 program of the paper's method, the other LLaDA runs from the authors'
release (PyTorch, float32). Everything decided must be equal, pass for pass.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from tests.oracles import numpy_model, polestar, polestar_parts
from tests.oracles.polestar_settings import BY_DRIFT, BY_FALLBACK, BY_SUFFIX, REFRESH, STEP

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLDENS = DATA / "goldens/polestar"
PAPER_RUNS = sorted(path.stem for path in GOLDENS.glob("*_paper_*.npz"))
RELEASE_RUNS = sorted(path.stem for path in GOLDENS.glob("*_polestar_*.npz"))
CHECKPOINTS = {"llada": "llada", "llada_gqa": "llada_gqa", "dream": "dream", "llada1l": "llada_1layer"}
FAST = (
    "dream_paper_history1_p33", "dream_paper_window_1_0_p33", "llada_gqa_paper_K4_p33", "llada_gqa_paper_nvfp4_direct_p33",
    "llada_paper_default_p33", "llada_paper_every_step_p33", "llada1l_polestar_skip_p33_g128_b8",
    "llada_gqa_polestar_p33_g128_b16", "llada_polestar_p7_g64_b16",
)  # fmt: skip
EXACT = ("block", "kind", "tokens", "step", "reason", "cluster_selected", "token_selected", "labels")
IDS = {"mask_id": 259, "eos_id": 257}


@pytest.fixture(scope="module")
def references() -> dict[str, numpy_model.Reference]:
    return {family: numpy_model.load(DATA / "checkpoints" / name) for family, name in CHECKPOINTS.items()}


def run_golden(name: str, references: dict, **changes: object) -> tuple[polestar.Run, dict[str, np.ndarray]]:
    """The oracle's run with a golden's prompt and settings, and the golden."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        golden = dict(file)
    family = name.split("_paper_")[0].split("_polestar_")[0]
    values = json.loads(str(golden["settings"]))
    preset = {"paper": polestar.PAPER, "release": polestar.RELEASE}[values.pop("preset")]
    settings = dataclasses.replace(preset, **values, **changes)
    shift = int(family == "dream")
    return polestar.decode(references[family], golden["prompt"], settings, **IDS, logit_shift=shift), golden


def assert_equal(run: polestar.Run, golden: dict[str, np.ndarray], *, tolerance: float) -> None:
    assert run.nfe == golden["nfe"] and run.refreshes == (golden["kind"] == REFRESH).sum()
    for name in EXACT:
        np.testing.assert_array_equal(getattr(run, name), golden[name], err_msg=name)
    for name in ("drift", "delta", "cluster_drift", "confidence"):
        if name in golden:
            np.testing.assert_allclose(getattr(run, name), golden[name], rtol=0, atol=tolerance, err_msg=name)


def test_goldens_are_there():
    assert len(PAPER_RUNS) == 14 and len(RELEASE_RUNS) == 6 and set(FAST) <= {*PAPER_RUNS, *RELEASE_RUNS}


def some_slow(runs: list[str]) -> list:
    return [pytest.param(run, marks=[] if run in FAST else pytest.mark.slow) for run in runs]


@pytest.mark.parametrize("name", some_slow(PAPER_RUNS))
def test_paper_runs(name, references):
    run, golden = run_golden(name, references)
    assert_equal(run, golden, tolerance=5e-3)
    noted = min(value for sort, value in run.margins.items() if sort not in ("fallback", "argmax"))
    assert noted == pytest.approx(float(golden["margin"]), abs=1e-6)  # the recorded one leaves these two out


@pytest.mark.parametrize("name", some_slow(RELEASE_RUNS))
def test_release_runs(name, references):
    run, golden = run_golden(name, references, eager_fallback=True)
    assert_equal(run, golden, tolerance=5e-5)


def test_release_tokens_do_not_hang_on_the_eager_fallback(references):
    run, golden = run_golden("llada_polestar_p7_g64_b16", references)
    np.testing.assert_array_equal(run.tokens, golden["tokens"])
    assert (run.reason != golden["reason"]).sum() == 2


def test_fallback_waits_for_the_drift_gate_unless_eager(references):
    run, golden = run_golden("dream_paper_history1_p33", references)
    eager, _ = run_golden("dream_paper_history1_p33", references, eager_fallback=True)
    np.testing.assert_array_equal(run.reason, golden["reason"])
    drift_only = {t for t in range(run.nfe) if run.kind[t] >= STEP and set(run.reason[run.step == t]) == {BY_DRIFT}}
    assert drift_only and not any(set(eager.reason[eager.step == t]) == {BY_DRIFT} for t in range(eager.nfe))


@pytest.mark.parametrize("case", range(6))
def test_kmeans_cases(case):
    with np.load(GOLDENS / "kmeans.npz") as file:
        points, centroids, labels = (file[f"kmeans{case}_{part}"] for part in ("points", "centroids", "labels"))
    ours, ours_labels = polestar_parts.kmeans(points.astype(float), len(centroids), 5, reseed=True)
    np.testing.assert_array_equal(ours_labels, labels)
    np.testing.assert_allclose(ours, centroids, rtol=0, atol=1e-5)


def test_empty_cluster_keeps_its_centroid_or_takes_its_seed():
    rows = np.array([[2, 1], [2, -3], [-1, 0], [1, 2], [-2, -3], [1, 3], [-3, -3]], float)
    kept, labels = polestar_parts.kmeans(rows, 4, 5, reseed=False)  # cluster 3 loses its last row on the way
    assert labels.tolist() == [0, 1, 1, 2, 1, 2, 1] and kept[3].tolist() == [0, 1.5]
    seeded, labels = polestar_parts.kmeans(rows, 4, 5, reseed=True)  # its seed, row 5, wins that row back
    assert labels.tolist() == [0, 1, 1, 2, 1, 3, 1] and seeded[3].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("grid", "dtype"), [(polestar_parts.E2M1, ml_dtypes.float4_e2m1fn), (polestar_parts.E4M3, ml_dtypes.float8_e4m3fn)]
)
def test_rounding_is_the_formats(grid, dtype):
    between = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, np.linspace(0, grid[-1], 997)])  # ties among them
    x = np.concatenate([between, -between])
    np.testing.assert_array_equal(polestar_parts.nearest(x, grid), x.astype(dtype).astype(float))
    assert polestar_parts.nearest(np.array([1e9, -1e9]), grid).tolist() == [grid[-1], -grid[-1]]


@pytest.mark.parametrize(
    ("quantization", "bound"), [("fp8", 1 / 16), ("int8", 1 / 254), ("mxfp4", 1 / 4), ("nvfp4", 1 / 5), ("int2", 1 / 2)]
)
def test_quantised_error_is_bounded_by_the_groups_largest(quantization, bound):
    x = np.random.default_rng(0).standard_normal((5, 64)) * np.geomspace(0.1, 10, 5)[:, None]
    x[3, :32] = 0
    size = polestar_parts.GROUP[quantization]
    largest = np.repeat(np.abs(x.reshape(5, -1, size)).max(-1), size, axis=-1)
    back = polestar_parts.quantised(x, quantization)
    assert (np.abs(back - x) <= bound * largest * (1 + 1e-6)).all() and (back != x).any()
    assert not back[3, :32].any()


def test_fifo_of_drifts_is_what_delta_is_measured_from(references):
    run, _ = run_golden("dream_paper_history1_p33", references)
    pairs = [t for t in range(1, run.nfe) if run.kind[t] >= STEP and run.kind[t - 1] >= STEP]
    here = ~np.isnan(run.drift[pairs])
    expected = run.drift[pairs] - run.drift[np.subtract(pairs, 1)]
    np.testing.assert_array_equal(run.delta[pairs][here], expected[here])


@pytest.mark.parametrize("patch", [True, False])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_sparse_equals_dense_when_committed_tokens_are_patched(family, patch, references):
    """Window over everything, all clusters, a refresh at every step, nothing lost in storage: full recomputation."""
    settings = polestar.Settings(
        gen_length=32,
        block_length=8,
        window_prefix=99,
        window_suffix=99,
        top_clusters=8,
        refresh_step=0,
        count_eos=True,
        quantization="none",
        tau_suffix=0.3,
        patch_committed=patch,
    )
    shift = int(family == "dream")
    prompt = np.arange(40, 53)
    run = polestar.decode(references[family], prompt, settings, **IDS, logit_shift=shift)
    assert (run.reason == BY_SUFFIX).any() and set(run.kind) >= {REFRESH}
    gaps = []
    before = np.full(32, 259)
    for t in range(run.nfe):
        logits = numpy_model.logits(references[family], np.concatenate([prompt, before]))
        logits[:, 259] = -np.inf
        confidence = polestar_parts.softmax(logits).max(axis=-1)[13 - shift : 45 - shift]
        gaps.append(np.nanmax(np.abs(run.confidence[t] - confidence)))
        before = run.tokens[t]
    assert (max(gaps) < 1e-9) == patch


def test_threshold_above_one_commits_one_token_a_pass(references):
    settings = polestar.Settings(
        gen_length=16, block_length=8, tau_static=1.5, current_commit=False, suffix_commit=False
    )
    run = polestar.decode(references["llada"], np.arange(9), settings, **IDS, logit_shift=0)
    assert run.nfe == 16 and sorted(run.step) == list(range(16)) and (run.reason == BY_FALLBACK).all()
