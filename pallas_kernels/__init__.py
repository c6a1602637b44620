"""GPU kernels of the decoding hot path, each with its definition in jax.numpy beside it.

=============  ===========================================================================================
attention      rows over cached keys, rotated in the tile; and what they attend to, and how far that moved
residual       NVFP4 rows read, patched and normed in one pass, and quantised back
head_scores    the vocabulary head's product and its scores, without logits in memory
vocab_scores   the same scores of logits that are there
=============  ===========================================================================================

This package depends on jax alone. Every operation is a folder with ``api.py`` (what callers import), ``ref.py`` (the
definition, and the route on every platform without a kernel) and ``triton.py`` (the Pallas kernel, and all that knows of
Triton). Which route runs is decided in :mod:`pallas_kernels.dispatch` and nowhere else.

Pallas's Triton route serves A100 and H100 from one source on jax 0.10.2 to 0.12; it is deprecated from 0.11 on. Its Mosaic
route did not serve both on jax 0.12.0: matrix products lower to Hopper's ``wgmma`` alone, and a kernel that only
exponentiates a tile ends the compiler for sm_80 ("Cannot select: llvm.nvvm.elect.sync").
"""
