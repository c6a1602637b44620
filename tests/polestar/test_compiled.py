"""How often Polestar compiles, what the compiled loop holds, and that it can be saved half-way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax import decoders
from polestar_jax.decode import engine
from polestar_jax.generation import generate
from tests.fakes import ONE_LAYER, POLESTAR, lively_model


def test_one_compile_a_bucket_over_fifty_prompts():
    model, decoder = lively_model(ONE_LAYER), decoders.polestar(**POLESTAR)
    engine.forget_programs()
    prompts = [[1 + i % 25] * (1 + (7 * i) % 60) for i in range(50)]
    answers = generate(model, None, prompts, decoder)
    assert len({engine.bucket(len(prompt)) for prompt in prompts}) == len(engine._compiled) == 2
    assert sum(answer.stats.refreshes for answer in answers) > 10
    generate(model, None, prompts[:3], decoders.polestar(**POLESTAR))
    assert len(engine._compiled) == 2  # an equal decoder is the same program


def test_the_loop_holds_one_state_however_many_passes_it_takes():
    model, sizes = lively_model(ONE_LAYER), {}
    for tau in (0.05, 1.5):  # an entry a block, or a pass a token
        decoder = decoders.polestar(**POLESTAR | {"tau_static": tau, "current_commit": False, "suffix_commit": False})
        state = engine.init_state(model, decoder, [1, 2, 3])
        loop, _ = engine.compile_decode(model, decoder, state)
        sizes[tau] = loop.memory_analysis()
        held = sum(x.nbytes for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
        assert sizes[tau].alias_size_in_bytes >= held  # donated, and updated in place
        passes = int(loop(engine.split(model)[1], state).nfe[0])
        assert passes == {0.05: 2, 1.5: 16}[tau]
    assert sizes[0.05].temp_size_in_bytes == pytest.approx(sizes[1.5].temp_size_in_bytes, abs=4096)


def test_a_state_saved_half_way_goes_on_as_if_nothing_had_been(tmp_path):
    """The whole state is a pytree of arrays: orbax stores it, and the loop finishes it."""
    import orbax.checkpoint as ocp

    model, decoder = lively_model(ONE_LAYER, seed=1), decoders.polestar(**POLESTAR)
    whole = engine.decode(model, decoder, engine.init_state(model, decoder, [3, 1, 4]))
    state = engine.init_state(model, decoder, [3, 1, 4])
    run = jax.jit(lambda state: engine.step(model, decoder, state))
    for _ in range(3):
        state = run(state)
    assert 0 < int(state.nfe[0]) < int(whole.nfe[0])
    plain = jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))
    leaves, structure = jax.tree.flatten(plain)
    saved = {f"{i:03}": leaf for i, leaf in enumerate(leaves)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", saved)
    loaded = jax.tree.map(jnp.asarray, jax.tree.unflatten(structure, [back[name] for name in saved]))
    loaded = loaded.replace(key=jax.random.wrap_key_data(loaded.key))
    finished = engine.decode(model, decoder, loaded)
    for field in ("tokens", "nfe", "reason", "committed_at", "refreshes"):
        np.testing.assert_array_equal(getattr(finished, field), getattr(whole, field))
