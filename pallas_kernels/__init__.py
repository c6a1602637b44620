"""GPU kernels of the decoding hot path, each with its definition in jax.numpy beside it.

This package depends on jax alone. Every operation is a folder with ``api.py`` (what callers import), ``ref.py`` (the
definition, and the route on every platform without a kernel) and ``triton.py`` (the Pallas kernel). Which route runs
is decided in :mod:`pallas_kernels.dispatch` and nowhere else.
"""
