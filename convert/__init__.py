"""Checkpoints between Hugging Face directories (safetensors) and this project's orbax directories.

Run it as ``python -m convert`` or ``polestar convert``. Nothing here executes a checkpoint's code or reads pickles.
"""
