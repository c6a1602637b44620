"""CPU only, whatever else is installed; programs compile without optimisation, which halves the time the tests take."""

import gc
import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """Compiled programs are dropped after each module: each maps memory of its own, and a process may have 65,530 maps."""
    yield
    import jax

    from polestar_jax.decode import engine

    engine.forget_programs()
    jax.clear_caches()
    gc.collect()
