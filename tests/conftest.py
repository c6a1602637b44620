"""CPU only, whatever else is installed, and little time spent on compiling: that is most of what the tests take.

Programs are compiled without optimisation, and once for all worker processes and the commands they start: they share a
compilation cache. It lasts as long as the session, unless JAX_COMPILATION_CACHE_DIR names one.
"""

import gc
import importlib.metadata
import os
import shutil
import tempfile

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    flags = ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += ["--xla_cpu_use_fusion_emitters=false"]  # two thirds of the time; later versions do not know it
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
programs = pytest.StashKey[str]()
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def pytest_configure(config):
    # Worker processes inherit what the first process sets.
    if PROGRAMS not in os.environ:
        os.environ[PROGRAMS] = config.stash[programs] = tempfile.mkdtemp(prefix="polestar-tests-")


def pytest_unconfigure(config):
    if programs in config.stash:
        shutil.rmtree(config.stash[programs], ignore_errors=True)
        del os.environ[PROGRAMS]


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """Compiled programs are dropped after each module: each maps memory of its own, and a process may have 65,530 maps."""
    yield
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    from polestar_jax.decode import engine

    engine.forget_programs()
    gc.collect()
    # Commands may have turned the cache off, or moved it.
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", os.environ[PROGRAMS])
    compilation_cache.reset_cache()
