"""``polestar chat``: turn by turn in a terminal, the answer filling in block by block."""

from __future__ import annotations

import argparse
import sys

from polestar_jax.cli import common, process
from polestar_jax.errors import InputError

EXAMPLES = """example:
  polestar chat --gen-length 64
In the chat, /reset forgets the conversation and /exit (or end of file) leaves.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    common.add_model_arguments(parser)
    common.add_method_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message in front")


def run(args: argparse.Namespace) -> int:
    if args.raw:
        raise InputError("--raw is not accepted: a chat needs the chat template")
    if sys.stdin is None:
        raise InputError("standard input is closed; a chat reads it")
    if process.output_is_closed():
        raise InputError("standard output is closed; a chat writes there")
    decoder = common.build_decoder(args)
    model, tokenizer = common.load_model(args)
    if tokenizer is None:
        raise InputError(f"--model {args.model} has no tokenizer files; a chat needs them")
    first = [{"role": "system", "content": args.system}] if args.system else []
    messages, turn = list(first), 0
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            messages = list(first)
            continue
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line.strip()}]
        try:
            answer = _answer(args, model, tokenizer, decoder, asked, turn)
        except InputError as error:  # too long by now, or a token that cannot be typed: the chat goes on
            print(f"polestar chat: {error} (/reset starts anew)", file=sys.stderr, flush=True)
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]
        turn += 1


def _answer(args: argparse.Namespace, model, tokenizer, decoder, messages: list[dict[str, str]], turn: int) -> str:
    """Decode one turn, printing the decided text as it grows."""
    from polestar_jax.cli.streaming import DecidedText
    from polestar_jax.generation import stream

    shown = DecidedText(tokenizer, model.spec)
    for state in stream(model, tokenizer, [messages], decoder, seed=(args.seed + turn) % 2**32):
        print(shown.grow(state.generated[0].tolist()), end="", flush=True)
    print(flush=True)
    return shown.text
