"""Polestar (arXiv 2607.14107): a cache refreshed, and tokens committed, where token representations drift."""
