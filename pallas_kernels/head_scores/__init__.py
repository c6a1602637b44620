"""Scores of rows over the vocabulary straight from the head's weights, without the logits in memory."""

from pallas_kernels.head_scores.api import head_scores
from pallas_kernels.vocab_scores.ref import VocabScores

__all__ = ["VocabScores", "head_scores"]
