"""Token, confidence, margin, entropy and log-sum-exp of vocabulary logits, row by row."""

from pallas_kernels.vocab_scores.api import VocabScores, vocab_scores

__all__ = ["VocabScores", "vocab_scores"]
