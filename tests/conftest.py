"""CPU only, whatever else is installed, and four devices of it for the sharding tests."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
