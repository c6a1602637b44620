"""Parsing, dispatch and the turning of errors into one line and an exit status."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from polestar_jax.cli import process
from polestar_jax.errors import InputError, RunError

# Verb -> (module with add_arguments(parser) and run(args) -> exit status, what it does). Imported when asked for.
VERBS = {
    "generate": ("polestar_jax.cli.generate", "prompts in, text out"),
    "chat": ("polestar_jax.cli.chat", "the same, turn by turn in a terminal"),
    "logits": ("polestar_jax.cli.logits", "one full forward, written as float32 logits"),
    "convert": ("polestar_jax.cli.convert", "Hugging Face directory to orbax directory, or back"),
    "verify": ("polestar_jax.cli.verify", "compare two models, tensor by tensor and by their logits"),
    "eval": ("polestar_jax.cli.eval", "methods on a task: accuracy, tokens a pass and a second; resumable"),
    "bench": ("polestar_jax.cli.bench", "what methods cost on one model, side by side"),
    "methods": ("polestar_jax.cli.methods", "the decoding methods, their settings, defaults and sources"),
    "models": ("polestar_jax.cli.models", "the models there are, and what can be converted"),
    "train-tiny": ("polestar_jax.cli.train_tiny", "train the embedded model again from nothing"),
}


class Parser(argparse.ArgumentParser):
    """argparse with one line on an error instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {_one_line(message)} (see {self.prog} --help)\n")


def command() -> NoReturn:
    """The ``polestar`` program: runs the verb of the command line and ends the process."""
    process.end_with(main, "polestar")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status. A reader that left (BrokenPipeError) is the caller's to deal with."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in argv if not word.startswith("-")), None)
    try:
        args = _parser(verb).parse_args(argv)
        status = importlib.import_module(VERBS[args.verb][0]).run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except InputError as error:
        return _fail(verb, error, 2)
    except BrokenPipeError:
        raise
    except (RunError, OSError) as error:
        return _fail(verb, error, 1)
    except Exception as error:  # what jax raises on the device, out of memory included
        if os.environ.get("POLESTAR_DEBUG"):
            raise
        if type(error).__name__ == "UnknownBackend":  # of POLESTAR_KERNELS; not imported, for that takes jax
            return _fail(verb, error, 2)
        return _fail(verb, f"{type(error).__name__}: {error} (POLESTAR_DEBUG=1 shows where)", 1)


def _parser(verb: str | None) -> Parser:
    """The parser with the arguments of ``verb`` alone, so that no other verb's modules are imported."""
    parser = Parser(prog="polestar", description="Drift-aware decoding of masked diffusion language models in JAX.")
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (module, summary) in VERBS.items():
        sub = verbs.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.description = summary[0].upper() + summary[1:] + "."
        if name == verb:
            importlib.import_module(module).add_arguments(sub)
    return parser


def _fail(verb: str | None, error: object, status: int) -> int:
    print(f"{f'polestar {verb}' if verb else 'polestar'}: error: {_one_line(error)}", file=sys.stderr)
    return status


def _one_line(error: object) -> str:
    """White space folded, and the middle of an overlong echo left out."""
    line = " ".join(str(error).split())
    return line if len(line) <= 1000 else f"{line[:600]} ... {line[-300:]}"


def _version() -> str:
    from polestar_jax import __version__

    return f"polestar {__version__}"
