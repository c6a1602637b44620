"""CPU only, whatever else is installed; programs compile without optimisation, which halves the time the tests take."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
