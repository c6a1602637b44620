"""Polestar's trajectories against recorded runs of independent programs, pass for pass, in float32.

``*_paper_*`` were recorded from a float64 program of the paper's method, the other LLaDA runs from the authors' release
(PyTorch). Drift values may differ by one rounded code of the stored states, 5e-3 at worst.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from polestar_jax import decoders
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.generation import trace_arrays
from polestar_jax.loading import load_model

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLDENS = DATA / "goldens/polestar"
RUNS = sorted(path.stem for path in GOLDENS.glob("*_p*.npz"))
CHECKPOINTS = {"llada": "llada", "llada_gqa": "llada_gqa", "dream": "dream", "llada1l": "llada_1layer"}
FAST = ("dream_paper_window_1_0_p33", "llada_paper_default_p33", "llada1l_polestar_skip_p33_g128_b8")
EXACT = ("tokens", "kind", "block", "reason", "step", "cluster_selected", "token_selected", "labels")


def settings_of(golden) -> dict:
    """The settings of a recorded run by our names."""
    values = json.loads(str(golden["settings"]))
    if values.get("top_clusters_last") == 0:  # as many as at the other layers
        values["top_clusters_last"] = None
    return values


def load(name: str):
    family = name.split("_paper_")[0].split("_polestar_")[0]
    return load_model(DATA / "checkpoints" / CHECKPOINTS[family], dtype="float32")


@pytest.mark.parametrize("name", [pytest.param(run, marks=[] if run in FAST else pytest.mark.slow) for run in RUNS])
def test_golden_trajectory(name):
    model = load(name)
    with np.load(GOLDENS / f"{name}.npz") as file:
        golden = dict(file)
    decoder = decoders.polestar(**settings_of(golden)).replace(trace=Trace())
    state = engine.decode(model, decoder, engine.init_state(model, decoder, golden["prompt"].tolist()))
    ours = trace_arrays(state, 0, model.spec, decoder)
    assert int(state.nfe[0]) == int(golden["nfe"])
    assert int(state.refreshes[0]) == (golden["kind"] == 3).sum()
    assert int(state.full_forwards[0]) == (golden["kind"] == 0).sum()
    for field in EXACT:
        np.testing.assert_array_equal(ours[field], golden[field], err_msg=field)
    for field in ("drift", "delta", "cluster_drift"):
        if field in golden:
            np.testing.assert_allclose(ours[field], golden[field], rtol=0, atol=5e-3, err_msg=field)


def test_all_runs_are_there():
    assert set(FAST) <= set(RUNS) and len(RUNS) == 20
