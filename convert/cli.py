"""The verbs ``convert`` and ``verify``, shared by ``polestar`` and ``python -m convert``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable

from polestar_jax.errors import InputError, RunError

CONVERT_HELP = "convert a checkpoint between Hugging Face and orbax directories"
VERIFY_HELP = "compare two model directories: tensors bit by bit, and logits on probe prompts"
CONVERT_EXAMPLE = "example: polestar convert LLaDA-8B-Instruct llada.orbax --dtype bfloat16"
VERIFY_EXAMPLE = "example: polestar verify LLaDA-8B-Instruct llada.orbax"


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``convert``."""
    parser.epilog = CONVERT_EXAMPLE
    parser.add_argument(
        "source", metavar="SRC", help="tiny, or a model directory: Hugging Face (safetensors) or converted"
    )
    parser.add_argument("destination", metavar="DST", help="directory to make; must not exist or be empty")
    parser.add_argument("--to", choices=("orbax", "hf"), default="orbax", help="layout to write (default: orbax)")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="cast weights to bfloat16, float16 or float32 (default: keep as stored)"
    )
    parser.add_argument(
        "--max-shard-bytes", type=int, metavar="N", help="with --to hf: most bytes per file (default: 5000000000)"
    )
    parser.add_argument(
        "--allow-unknown", action="store_true", help="leave out tensors the model does not have instead of refusing"
    )
    parser.add_argument("--json", action="store_true", help="report as one JSON object on standard output")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``verify``."""
    parser.epilog = VERIFY_EXAMPLE
    parser.add_argument("a", metavar="A", help="tiny, or a model directory of either layout")
    parser.add_argument("b", metavar="B", help="tiny, or a model directory of either layout")
    parser.add_argument("--no-logits", action="store_true", help="compare tensors only")
    parser.add_argument("--json", action="store_true", help="report as one JSON object on standard output")


def run_convert(args: argparse.Namespace) -> int:
    """Run ``convert``; the exit status. InputError and RunError are the caller's to report."""
    from convert.to_hf import MAX_SHARD_BYTES, to_hf
    from convert.to_orbax import to_orbax

    if args.max_shard_bytes is not None and args.to != "hf":
        raise InputError("--max-shard-bytes goes with --to hf only")
    if args.max_shard_bytes is not None and args.max_shard_bytes < 1:
        raise InputError(f"--max-shard-bytes {args.max_shard_bytes} is not accepted: a whole number from 1 on")
    _use_cpu()
    start = time.monotonic()
    options = {"dtype": args.dtype, "allow_unknown": args.allow_unknown, "progress": _progress("convert")}
    if args.to == "hf":
        limit = MAX_SHARD_BYTES if args.max_shard_bytes is None else args.max_shard_bytes
        done = to_hf(args.source, args.destination, max_shard_bytes=limit, **options)
    else:
        done = to_orbax(args.source, args.destination, **options)
    report = {
        "source": args.source,
        "destination": os.path.abspath(args.destination),
        "to": args.to,
        **dataclasses.asdict(done),
        "seconds": round(time.monotonic() - start, 3),
    }
    if done.unknown:
        print(f"convert: left out {len(done.unknown)} unknown tensors: {', '.join(done.unknown[:5])}", file=sys.stderr)
    if args.json:
        print(json.dumps(report, allow_nan=False))
    else:
        what = f"{done.family}, {done.tensors} tensors, {done.bytes} bytes, {'+'.join(done.dtypes)}"
        print(f"{_printable(report['destination'])}: {what}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Run ``verify``; 0 where both are the same, 1 where not."""
    from convert.verify import verify

    _use_cpu()
    report = verify(args.a, args.b, logits=not args.no_logits, progress=_progress("verify"))
    if args.json:
        print(json.dumps({"a": args.a, "b": args.b, **dataclasses.asdict(report)}, allow_nan=False))
        return 0 if report.same else 1
    for line in report.differences:
        print(line)
    if report.difference_count > len(report.differences):
        print(f"... and {report.difference_count - len(report.differences)} more differences")
    gap = report.max_logit_difference
    logits = "not compared" if gap is None else f"differ by at most {gap:.3g}"
    if report.logits_finite is False:
        logits = "not finite"
    verdict = "the same" if report.same else f"different ({report.difference_count} differences)"
    print(f"{verdict}: {report.tensors} tensors of {report.bytes} bytes compared, logits {logits}")
    return 0 if report.same else 1


def main(argv: list[str] | None = None) -> int:
    """``python -m convert SRC DST ...`` and ``python -m convert verify A B``."""
    argv = sys.argv[1:] if argv is None else argv
    verb = argv[0] if argv and argv[0] in ("convert", "verify") else None
    description, add, run = (
        (VERIFY_HELP, add_verify_arguments, run_verify)
        if verb == "verify"
        else (CONVERT_HELP, add_convert_arguments, run_convert)
    )
    prog = "python -m convert" + (f" {verb}" if verb else "")
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add(parser)
    parser.epilog = parser.epilog.replace("polestar convert", prog).replace("polestar", "python -m convert")
    args = parser.parse_args(argv[1:] if verb else argv)
    try:
        return run(args)
    except (InputError, RunError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _printable(path: str) -> str:
    """A path for standard output, which takes no name that is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _use_cpu() -> None:
    """Converting needs no accelerator; without this, JAX would reserve most of its memory."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _progress(verb: str) -> Callable[[str], None]:
    """Prints progress to standard error, which leaves standard output to the report."""
    return lambda line: print(f"{verb}: {line}", file=sys.stderr, flush=True)
