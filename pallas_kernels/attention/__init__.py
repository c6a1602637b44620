"""Attention of some rows over cached keys, what they attend to, and how far that has moved."""

from pallas_kernels.attention.api import attend, measure
from pallas_kernels.attention.ref import Distribution, Measured, rotate

__all__ = ["Distribution", "Measured", "attend", "measure", "rotate"]
