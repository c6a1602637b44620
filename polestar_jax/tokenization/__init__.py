"""Text to token ids and back, from a checkpoint's own tokenizer files: no network, no remote code."""

from __future__ import annotations

from polestar_jax.tokenization.files import TOKENIZER_FILES
from polestar_jax.tokenization.tokenizer import Tokenizer, load_tokenizer

__all__ = ["TOKENIZER_FILES", "Tokenizer", "load_tokenizer"]
