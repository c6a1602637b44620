"""``polestar eval``: methods on a task, side by side: accuracy, tokens a pass and a second; resumable."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from polestar_jax.cli import common
from polestar_jax.errors import InputError

EXAMPLES = """examples:
  polestar eval --task tiny --out results
  polestar eval --task tiny --methods all --batch-size 50 --timed 5 --out results --plot
  polestar eval --task tiny --methods vanilla,parallel,polestar --sweep alpha=2.5,5,10,20,40 --out sweep
  polestar eval --task tiny --methods 'polestar,polestar[refresh_step=-1,top_clusters=8]' --out variants
  polestar eval --from results --plot
The same command again goes on where it was stopped. More methods may be added to a directory; other prompts, models, settings of
a run or versions are refused there.
DIR gets answers.jsonl (one line an answer), runs.json (what made them), summary.json, summary.md, summary.csv and, with --plot,
pareto.svg, pareto.png and, where settings were swept, sweeps.svg and sweeps.png.
"""
METHODS = "vanilla,parallel,polestar"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from polestar_jax.eval import choices, tasks

    parser.epilog = EXAMPLES
    parser.add_argument("--task", metavar="NAME", help=f"one of: {', '.join(tasks.names())}")
    parser.add_argument("--data", metavar="F", help="the task's items, where it does not bring them")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the task; repeatable"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N items of each subset")
    parser.add_argument(
        "--methods", default=METHODS, metavar="A,B",
        help=f"all, or names, each with settings of its own in brackets if it has any: A[KEY=VALUE,...] (default: {METHODS})",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="[METHOD.]KEY=VALUE", dest="settings",
        help="a setting of one method, or of all that have it; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="[METHOD.]KEY=A,B,...",
        help="a run for each value, of one method or of all that have the setting; several: one after the other; settings that "
        "change together: KEY:KEY=A:A,B:B",
    )  # fmt: skip
    common.add_model_arguments(parser)
    parser.add_argument("--gen-length", type=int, metavar="N", help="generated positions (default: the task's)")
    parser.add_argument(
        "--block-length",
        type=int,
        metavar="N",
        help="positions of a block (default: the task's, for methods with blocks)",
    )
    modes = "; ".join(f"{name}: {meaning}" for name, meaning in choices.PROMPT_MODES.items())
    parser.add_argument("--prompt-mode", choices=choices.PROMPT_MODES, help=f"{modes} (default: a chat)")
    post = "; ".join(f"{name}: {meaning}" for name, meaning in choices.POST.items())
    parser.add_argument(
        "--post-process", choices=choices.POST, default=next(iter(choices.POST)), help=f"of the text: {post}"
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="items decoded together (default: 1)")
    parser.add_argument(
        "--timed", type=int, default=0, metavar="N",
        help="with a larger batch size: decode the first N items of each subset once more, one at a time, for tokens per second",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples (default: 0)")
    parser.add_argument("--allow-code-execution", action="store_true", help="for tasks that run what a model wrote")
    parser.add_argument("--out", metavar="DIR", help="where answers and summary go")
    parser.add_argument(
        "--from", nargs="+", metavar="DIR", dest="source",
        help="decode nothing: tabulate, and with --plot draw, what is there; several are put side by side, in --out if given",
    )  # fmt: skip
    parser.add_argument("--plot", action="store_true", help="draw accuracy against TPF and TPS (needs the extra plots)")
    parser.add_argument("--json", action="store_true", help="one JSON object a run")


def run(args: argparse.Namespace) -> int:
    if args.plot:
        from polestar_jax.eval import plot

        plot.check_available()
    if args.source:
        return _tabulate(args)
    from polestar_jax.decoders import variants
    from polestar_jax.eval import tasks

    task = _settle(args)
    decoders = variants.build(
        args.methods, args.settings, args.sweep, gen_length=args.gen_length or task.gen_length,
        block_length=args.block_length, block_default=task.block_length,
    )  # fmt: skip
    options = _options(task, args.option, may_run_code=args.allow_code_execution)
    items = tasks.chosen(task, Path(args.data) if args.data else None, options, args.limit)
    tasks.check_score(task, items)
    return _evaluate(args, task, items, options, decoders)


def _settle(args: argparse.Namespace) -> Any:
    """The task, once everything that can be checked before its items are read has been."""
    from polestar_jax.eval import records, tasks

    for option in ("task", "out"):
        if not getattr(args, option):
            raise InputError(
                f"--{option} is missing" + (f"; tasks: {', '.join(tasks.names())}" if option == "task" else "")
            )
    task = tasks.get(args.task)
    limits = {"limit": 1, "gen_length": 1, "block_length": 1, "batch_size": 1, "timed": 0, "seed": 0}
    for name, low in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value < 2**32:
            raise InputError(
                f"--{name.replace('_', '-')} {value} is not accepted: a whole number in {low}..{2**32 - 1}"
            )
    if task.runs_code and not args.allow_code_execution:
        raise InputError(f"task {task.name} runs what the model wrote: give --allow-code-execution")
    if task.needs_data and not args.data:
        raise InputError(f"task {task.name} needs its items: --data F")
    if args.timed and args.batch_size == 1:
        print("notice: --timed is not needed: with --batch-size 1 every answer is timed", file=sys.stderr)
    records.check(Path(args.out))
    return task


def _options(task: Any, texts: list[str], *, may_run_code: bool) -> dict[str, Any]:
    """What the task's items are made by: ``--option``, checked where the task says what there is."""
    from polestar_jax.settings import checked

    given: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"--option {text} is not accepted: KEY=VALUE")
        if task.options is not None and key not in task.options:
            raise InputError(f"task {task.name} has no option {key}; accepted: {', '.join(task.options) or 'none'}")
        if given.setdefault(key, value) != value:
            raise InputError(f"option {key} is given twice: {given[key]} and {value}")
    if task.options is not None:
        given = checked(task.options, {key: task.options[key].parse(key, given[key]) for key in given}, task.name)
    return given | ({"allow_code_execution": True} if task.runs_code and may_run_code else {})


def _evaluate(
    args: argparse.Namespace, task: Any, items: list[Any], options: dict[str, Any], decoders: dict[str, Any]
) -> int:
    from polestar_jax.eval import about, prompts, records, run, summary, tasks
    from polestar_jax.eval.progress import Progress
    from polestar_jax.loading import model_directory

    mode = prompts.mode_for(items, args.prompt_mode)
    model, tokenizer = common.load_model(args)
    longest = max(decoder.gen_length for decoder in decoders.values())
    ids = prompts.prompt_ids(items, mode, tokenizer, model.spec, longest)
    work = run.Evaluation(
        model=model, tokenizer=tokenizer, task=task, items=items, prompts=ids, batch_size=args.batch_size, seed=args.seed,
        runs={key: decoder.for_model(model.spec, tokenizer) for key, decoder in decoders.items()}, post=args.post_process,
        timed=tasks.first_of_each(items, args.timed) if args.batch_size > 1 else (),
    )  # fmt: skip
    notes = {"model": args.model, "revision": about.revision(model_directory(args.model)), "data": args.data}
    if task.runs_code:
        notes["isolation"] = _isolation()
    record = about.record(work, prompt_mode=mode, options=options, versions=common.versions(), notes=notes)
    run.check(work)
    out = Path(args.out)
    with records.opened(out, record) as answers:
        left = {(key, kind): 0 for key in work.runs for kind in (False, True)}
        for key in work.runs:
            for timed, batch in run.pending(work, answers, key):
                left[key, timed] += len(batch)
        whole = lambda: summary.summarise(answers.record, answers.lines)  # noqa: E731
        progress = Progress(left)

        def ended(key: str) -> None:
            progress.ended(key)
            summary.write(out, [whole()])

        failed = run.evaluate(work, answers, on_batch=progress, on_run=ended)
        found = whole()
        summary.write(out, [found])
        for key, why in failed.items():
            print(f"polestar eval: error: run {key}: {why}", file=sys.stderr)
        if len(failed) < len(work.runs):
            _show(args, [found], out)
    return int(bool(failed))


def _isolation() -> list[str]:
    """What keeps code that models write away from this machine; a notice where that is an audit hook alone."""
    from polestar_jax.eval import sandbox

    found = list(sandbox.isolation())
    if "network" not in found:
        print(
            "notice: this system gives no namespaces: an audit hook alone stands between the machine and the code that a model "
            "writes; use a container of its own",
            file=sys.stderr,
        )
    return found


def _tabulate(args: argparse.Namespace) -> int:
    """``--from``: the summaries of directories with answers."""
    from polestar_jax.eval import records, summary

    given = [f"--{name}" for name in ("task", "data", "limit", "option", "settings", "sweep") if getattr(args, name)]
    if given:
        raise InputError(f"{given[0].replace('settings', 'set')} does not go with --from, which decodes nothing")
    if len(args.source) > 1 and args.plot and not args.out:
        raise InputError("--from with several directories and --plot needs --out, where the plot goes")
    found = [summary.summarise(*records.read(Path(source))) for source in args.source]
    out = Path(args.out) if args.out else Path(args.source[0]) if len(args.source) == 1 else None
    if out is not None:
        if (
            args.out
            and (out / records.RUNS).exists()
            and [out.resolve()] != [Path(path).resolve() for path in args.source]
        ):
            raise InputError(f"--out {out} holds an evaluation of its own; give another directory")
        records.check(out)
        out.mkdir(parents=True, exist_ok=True)
        summary.write(out, found, lock=True)
    _show(args, found, out)
    return 0


def _show(args: argparse.Namespace, found: list[dict[str, Any]], out: Path | None) -> None:
    from polestar_jax.eval import tables

    if args.json:
        for each in found:
            for one in each["runs"]:
                common.print_json(one | {"about": each["about"], "notes": each["notes"]})
    else:
        text = tables.markdown(found)
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
    if args.plot:
        from polestar_jax.eval import plot

        for path in plot.draw(found, out):
            print(f"wrote {path}", file=sys.stderr)
