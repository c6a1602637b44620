"""The embedded trained model: its tasks, tokenizer, training recipe and weights (LLaDA layout)."""

import pathlib

DIRECTORY = pathlib.Path(__file__).with_name("weights")
