"""Fixtures of the conversion tests."""

import functools
import gc

import jax
import numpy as np
import pytest
from flax import nnx

from polestar_jax.errors import InputError
from polestar_jax.loading import load_model


@pytest.fixture
def refuses_to_load(monkeypatch):
    """Returns a function: loading a directory fails with InputError before anything is put on a device; the message."""

    def refuse(directory, **options) -> str:
        def put(*_args, **_kwargs):
            raise AssertionError("device memory was taken before the checkpoint was found faulty")

        gc.collect()
        before = len(jax.live_arrays())
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", put)
            with pytest.raises(InputError) as caught:
                load_model(directory, **options)
        assert len(jax.live_arrays()) <= before
        message = str(caught.value)
        assert "\n" not in message
        return message

    return refuse


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, state, tokens, positions, valid):
    model = nnx.merge(graph, state)
    return model.logits(model(tokens, positions, valid))


@pytest.fixture(scope="session")
def forward():
    """Returns a function: float32 logits [n, v] of a model on one sequence of ids."""

    def run(model, tokens, positions=None, valid=None):
        tokens = np.asarray(tokens, np.int32)[None]
        positions = np.arange(tokens.shape[1], dtype=np.int32) if positions is None else positions
        with jax.default_matmul_precision("highest"):
            return np.asarray(
                _logits(*nnx.split(model), tokens, positions[None], None if valid is None else valid[None])
            )[0]

    return run
