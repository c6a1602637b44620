"""Compiling for NVIDIA GPUs on a machine that has none, to check memory, copies and launches of the decoding loop.

``python -m polestar_jax.aot h100 --model llada-8b --what vanilla-step`` prints one JSON object. It needs jax's CUDA
plug-in beside the CPU build (``pip install 'polestar-jax[aot]'``) and no driver. Tile sizes and library choices are
the compiler's defaults, since nothing can be timed: shapes, memory, in-place updates and launch structure hold on the
real device, speed does not follow from them.
"""
