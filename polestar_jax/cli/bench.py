"""``polestar bench``: what methods cost on one model, side by side in one run; or, compiled only, what they need on a GPU."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from polestar_jax.cli import common, process
from polestar_jax.errors import InputError

EXAMPLES = """examples:
  polestar bench --random mid --methods vanilla,parallel,polestar
  polestar bench --random layers=4,d_model=256 --methods polestar --set clusters=16 --set polestar.refresh_step=1
  polestar bench --model path/to/LLaDA-8B-Instruct --methods parallel,polestar --dtype bfloat16 --json
  polestar bench --aot h100 --model llada-8b --methods polestar,parallel
Prompts are random tokens: times hold for any text, the number of passes does not.
--aot compiles every pass for a GPU, without one, and reports memory, traffic, kernels and copies; it needs the extra aot and
takes minutes a pass at full depth. It takes --model, --layers, --dtype, --ptx, the lengths, --batch-size, --methods, --json and
--output.
sizes of --random and their defaults, which are those of mid:
"""
# What an option is where it is not given, without and with --aot.
MEASURED = {
    "methods": "vanilla,parallel,polestar", "prompt_length": 128, "gen_length": 128, "batch_size": 1, "repeats": 5, "seed": 0,
    "cache_dir": "off",
}  # fmt: skip
COMPILED = {"methods": "polestar", "prompt_length": 1024, "gen_length": 256, "batch_size": 1, "dtype": "bfloat16"}
# Options that go with the one or the other alone, by attribute.
MEASURED_ONLY = {
    "random": "--random", "settings": "--set", "sweep": "--sweep", "repeats": "--repeats", "seed": "--seed",
    "cache_dir": "--cache-dir",
}  # fmt: skip
COMPILED_ONLY = {"layers": "--layers", "ptx": "--ptx"}
NUMBERS = {"prompt_length": (1, 2**17), "gen_length": (1, 2**17), "batch_size": (1, 4096), "repeats": (1, 1000)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from polestar_jax.aot.targets import TARGETS
    from polestar_jax.bench.sizes import SIZES

    parser.epilog = EXAMPLES + "".join(
        f"  {name} = {'none' if size.default is None else size.default}  [{size.accepted}]  {size.help}\n"
        for name, size in SIZES.items()
    )
    parser.add_argument(
        "--methods",
        metavar="A,B",
        help=f"all, or names, each with settings of its own in brackets if it has any: A[KEY=VALUE,...]; with --aot names alone "
        f"(default: {MEASURED['methods']}; with --aot: {COMPILED['methods']})",
    )
    parser.add_argument("--aot", choices=TARGETS, help="compile for this GPU instead of measuring; needs no GPU")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        metavar="M",
        help="tiny (default), a Hugging Face directory, or a converted one; "
        "with --aot: llada-8b or dream-7b (default: both)",
    )
    which.add_argument(
        "--random", metavar="SIZES", help="a random model instead: mid, or SIZE=VALUE,... over the sizes of mid"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="with --aot: only the first N layers (default: all)")
    parser.add_argument(
        "--ptx", action=argparse.BooleanOptionalAction,
        help="with --aot: registers and spills of the kernels; default: before jax 0.11, later it takes minutes a layer",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=common.DTYPES,
        help="of the weights; default: float32 on a CPU; elsewhere as stored, bfloat16 for a random model and with --aot",
    )  # fmt: skip
    parser.add_argument("--prompt-length", type=int, metavar="N", help="tokens (default: 128; with --aot: 1024)")
    parser.add_argument(
        "--gen-length", type=int, metavar="N", help="generated positions (default: 128; with --aot: 256)"
    )
    parser.add_argument(
        "--block-length", type=int, metavar="N", help="of a block (default: 32, or gen-length below 32)"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="prompts decoded together (default: 1)")
    parser.add_argument("--repeats", type=int, metavar="N", help="medians of this many (default: 5)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="[METHOD.]KEY=VALUE", dest="settings",
        help="a setting of one method, or of all that have it; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="[METHOD.]KEY=A,B,...",
        help="a run for each value, of one method or of all that have the setting; several: one after the other; settings that "
        "change together: KEY:KEY=A:A,B:B",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, prompts and samples (default: 0)")
    parser.add_argument(
        "--cache-dir",
        metavar="DIR|off",
        help="compilation cache; default: off, for compile times are measured",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a method; with --aot: a pass")
    parser.add_argument("--output", metavar="F", help="write the report there instead of standard output")


def run(args: argparse.Namespace) -> int:
    settle(args)
    return _compiled(args) if args.aot else _measured(args)


def settle(args: argparse.Namespace) -> None:
    """Refuse options that do not go together and numbers out of range; fill in what is not given."""
    for name, option in (MEASURED_ONLY if args.aot else COMPILED_ONLY).items():
        if getattr(args, name) not in (None, []):
            raise InputError(f"{option} does not go with --aot" if args.aot else f"{option} goes with --aot alone")
    for name, value in (COMPILED if args.aot else MEASURED).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, (low, high) in NUMBERS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"--{name.replace('_', '-')} {value} is not accepted: a whole number in {low}..{high}")
    if args.seed is not None and not 0 <= args.seed < 2**32:
        raise InputError(f"--seed {args.seed} is not accepted: a whole number in 0..{2**32 - 1}")


def _output(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Where the report goes; refused before the work where it cannot be written."""
    common.check_outputs(output=args.output)
    if not args.output and process.output_is_closed():
        raise InputError("standard output is closed; name a file with --output")
    return common.replacing(args.output) if args.output else contextlib.nullcontext(sys.stdout)


def _progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _compiled(args: argparse.Namespace) -> int:
    """Every pass compiled for a GPU; status 1 where one did not compile."""
    from polestar_jax.aot.cases import Size
    from polestar_jax.bench import compiled
    from polestar_jax.models.published import PUBLISHED

    decoders = _decoders(args)
    if variants := [key for key, decoder in decoders.items() if key != decoder.name]:
        raise InputError(f"--methods {variants[0]} does not go with --aot: names alone")
    size = dict(
        layers=args.layers, prompt=args.prompt_length, gen=args.gen_length, batch=args.batch_size, dtype=args.dtype,
        block=next(iter(decoders.values())).settings()["block_length"],
    )  # fmt: skip
    sizes = [Size(model=name, **size) for name in ([args.model] if args.model else PUBLISHED)]
    ptx = compiled.gives_ptx() if args.ptx is None else args.ptx
    rows = []
    with _output(args) as out:
        for row in compiled.compile_all(args.aot, sizes, list(decoders), ptx=ptx, on_progress=_progress):
            rows.append(row)
            if args.json:
                common.print_json(row, out)
        if not args.json:
            print(compiled.table(args.aot, rows), file=out, flush=True)
    return int(any("error" in row for row in rows))


def _measured(args: argparse.Namespace) -> int:
    from polestar_jax.bench import measure, models, report
    from polestar_jax.bench.sizes import parse_sizes

    sizes = None if args.random is None else parse_sizes(args.random)
    decoders = _decoders(args)
    target = _output(args)
    model, tokenizer = _model(args, sizes)
    spec = model.spec
    if args.prompt_length + args.gen_length > spec.max_length:
        raise InputError(
            f"--prompt-length {args.prompt_length} and --gen-length {args.gen_length} make "
            f"{args.prompt_length + args.gen_length}, more than the model's max_length {spec.max_length}"
        )
    prompts = models.random_prompts(spec, args.batch_size, args.prompt_length, seed=args.seed)
    runs = {key: decoder.for_model(spec, tokenizer) for key, decoder in decoders.items()}
    with target as out:
        results = measure.bench(model, runs, prompts, repeats=args.repeats, seed=args.seed, on_progress=_progress)
        about = {
            "model": args.model or ("tiny" if sizes is None else "random"),
            "sizes": report.sizes(spec),
            "dtype": str(model.dtype),
            **{name: getattr(args, name) for name in ("batch_size", "prompt_length", "gen_length", "repeats", "seed")},
        }
        if args.json:
            tail = about | {"machine": report.machine(), "versions": common.versions()}
            for each in results:
                common.print_json(report.as_json(each, results) | {"settings": each.decoder.settings()} | tail, out)
        else:
            print(report.table(results, model, about), file=out, flush=True)
    return 0


def _decoders(args: argparse.Namespace) -> dict[str, Any]:
    """The decoders of the runs by key; InputError names what is wrong and what is accepted."""
    from polestar_jax.decoders import variants

    found = variants.build(
        args.methods, args.settings, args.sweep, gen_length=args.gen_length, block_length=args.block_length
    )
    for key, decoder in found.items():
        if decoder.gen_length != args.gen_length:
            raise InputError(f"run {key}: gen_length is the same for all; use --gen-length")
    return found


def _model(args: argparse.Namespace, sizes: dict[str, Any] | None) -> tuple[Any, Any]:
    """(model, its tokenizer); a random model has none."""
    import jax

    from polestar_jax import compilation_cache
    from polestar_jax.bench import models

    if sizes is None:
        args.model = args.model or "tiny"
        return common.load_model(args)
    compilation_cache.enable(args.cache_dir)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return models.random_model(sizes, seed=args.seed, dtype=dtype), None
