"""Vanilla and parallel trajectories of independent implementations, token for token, pass for pass, in float32."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import commit, decoders
from polestar_jax.decode import engine
from polestar_jax.decode.trace import Trace
from polestar_jax.loading import load_model

DATA = pathlib.Path(__file__).parents[1] / "data"
RUNS = json.loads((DATA / "goldens/decode/runs.json").read_text())
FAST = [name for name in RUNS if name.endswith("_p33")]  # every method and checkpoint, with one length of the prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedOrigin(commit.Origin):
    """Dream's ``origin`` fed with the uniform numbers of the recorded run: one a masked position, in order."""

    numbers: tuple[float, ...]
    offsets: tuple[int, ...]

    def uniform(self, scores, state):
        place = jnp.asarray(self.offsets)[state.span_passes][:, None] + jnp.cumsum(scores.eligible, axis=-1) - 1
        return jnp.asarray(self.numbers, jnp.float32)[jnp.clip(place, 0, len(self.numbers) - 1)]


def decoder_for(run: dict, golden) -> decoders.Decoder:
    # The recorded samplers do not bar the mask token; its logit is 0 and takes part in their softmax.
    common = dict(gen_length=run["gen_length"], block_length=run["block_length"], exclude_mask=False)
    if "threshold" in run:
        steps = run["steps"] if run.get("alg") == "confidence_threshold" else None
        return decoders.parallel(threshold=run["threshold"], steps=steps, **common)
    if "alg" not in run:
        return decoders.vanilla(steps=run["steps"], **common)
    if run["alg"] != "origin":
        return decoders.vanilla(steps=run["steps"], order=run["alg"], quota="dream_floor", eps=run["eps"], **common)
    offsets = np.concatenate([[0], np.cumsum(golden["uniforms_len"].astype(int))])
    rule = RecordedOrigin(
        steps_per_block=run["steps"],
        eps=run["eps"],
        numbers=tuple(golden["uniforms"].tolist()),
        offsets=tuple(offsets.tolist()),
    )
    return decoders.vanilla(steps=run["steps"], order="origin", **common).replace(commit=rule)


@pytest.fixture(scope="module")
def models():
    return {name: load_model(DATA / "checkpoints" / name, dtype="float32") for name in ("llada", "llada_gqa", "dream")}


@pytest.mark.parametrize("name", [pytest.param(run, marks=[] if run in FAST else pytest.mark.slow) for run in RUNS])
def test_golden_trajectory(name, models):
    run, golden = RUNS[name], np.load(DATA / f"goldens/decode/{name}.npz")
    model, prompt = models[run["checkpoint"]], golden["prompt"].tolist()
    decoder = decoder_for(run, golden).replace(trace=Trace("tokens"))
    state = engine.decode(model, decoder, engine.init_state(model, decoder, prompt))
    passes = int(state.nfe[0])
    assert passes == run["forwards"]
    np.testing.assert_array_equal(np.asarray(state.trace["tokens"])[:passes, 0], golden["history"][1:, len(prompt) :])
    np.testing.assert_array_equal(state.generated[0], golden["tokens_final"][len(prompt) :])
