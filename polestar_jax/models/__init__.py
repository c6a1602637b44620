"""The denoiser."""
