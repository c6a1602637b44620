"""Rows kept as NVFP4 residuals to their centroids: read, patched and normed in one pass, and quantised back."""

from pallas_kernels.residual.api import patched, quantised
from pallas_kernels.residual.nvfp4 import GROUP, Nvfp4
from pallas_kernels.residual.ref import Patched

__all__ = ["GROUP", "Nvfp4", "Patched", "patched", "quantised"]
