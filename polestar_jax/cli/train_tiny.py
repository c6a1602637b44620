"""``polestar train-tiny``: train the embedded model again from nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
from typing import Any

from polestar_jax.cli import common
from polestar_jax.errors import InputError

EXAMPLES = """examples:
  polestar train-tiny retrained
  polestar train-tiny trial --steps 200 --decay-steps 100
  polestar generate --model retrained --prompt "Copy the list: a b c"
An interrupted run goes on where it stopped when the same command is given again.
"""
CHECKPOINT_EVERY = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("out", metavar="OUT", help="directory to make (LLaDA layout); must not exist")
    for field, low in (("steps", 1), ("decay_steps", 0), ("batch", 4), ("seed", 0)):
        parser.add_argument(
            f"--{field.replace('_', '-')}", type=int, metavar="N", help=f"default: the recipe's; at least {low}"
        )
    common.add_cache_arguments(parser)
    parser.add_argument("--json", action="store_true", help="report as a JSON object")


def run(args: argparse.Namespace) -> int:
    from convert.staging import staged
    from polestar_jax import compilation_cache
    from polestar_jax.tiny.export import save_checkpoint
    from polestar_jax.tiny.train import Recipe, train

    given = {
        key: getattr(args, key) for key in ("steps", "decay_steps", "batch", "seed") if getattr(args, key) is not None
    }
    for key, low in (("steps", 1), ("decay_steps", 0), ("batch", 4), ("seed", 0)):
        if given.get(key, low) < low:
            raise InputError(f"--{key.replace('_', '-')} {given[key]} is not accepted: a whole number >= {low}")
    recipe = Recipe(**given)
    if recipe.decay_steps > recipe.steps:
        raise InputError(f"--decay-steps {recipe.decay_steps} is more than --steps {recipe.steps}")
    out = pathlib.Path(args.out).absolute()
    if out.exists():
        raise InputError(f"{args.out} exists; name a directory that does not")
    compilation_cache.enable(args.cache_dir)
    keeper = Checkpoints(out.with_name(f".{out.name}.training"), recipe)

    def progress(step: int, loss: float, seconds: float) -> None:
        print(f"step {step}/{recipe.steps} loss {loss:.4f} {seconds:.0f} s", file=sys.stderr, flush=True)

    model = train(recipe, on_progress=progress, on_checkpoint=keeper.save, resume=keeper.restore)
    with staged(out) as partial:
        save_checkpoint(model, partial)
        (partial / "recipe.json").write_text(json.dumps(dataclasses.asdict(recipe), indent=1) + "\n")
    keeper.remove()
    if args.json:
        common.print_json({"out": str(out), "parameters": model.spec.parameters, "recipe": dataclasses.asdict(recipe)})
    else:
        print(out)
    return 0


class Checkpoints:
    """The latest training state beside the output, for a run that is stopped; one of another recipe is refused."""

    def __init__(self, directory: pathlib.Path, recipe: Any):
        self.directory, self.recipe = directory, dataclasses.asdict(recipe)
        note = directory / "recipe.json"
        try:
            same = not directory.exists() or json.loads(note.read_text()) == self.recipe
        except (OSError, ValueError):
            same = False
        if not same:
            raise InputError(f"{directory} is no interrupted run of this recipe; remove it or give its settings")
        if not directory.exists():
            fresh = directory.with_name(directory.name + ".new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            (fresh / "recipe.json").write_text(json.dumps(self.recipe))
            fresh.rename(directory)

    def restore(self, carry: Any) -> tuple[int, Any]:
        """(steps done, carry): the saved ones, else (0, the given one)."""
        import orbax.checkpoint as ocp

        saved = sorted(self.directory.glob("step_*[0-9]"))
        if not saved:
            return 0, carry
        with ocp.StandardCheckpointer() as checkpointer:
            carry = checkpointer.restore(saved[-1], carry)
        print(f"going on from step {int(saved[-1].name[5:])}", file=sys.stderr)
        return int(saved[-1].name[5:]), carry

    def save(self, step: int, carry: Any) -> None:
        import orbax.checkpoint as ocp

        if step % CHECKPOINT_EVERY:
            return
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.directory / f"step_{step:07d}", carry)
        for old in sorted(self.directory.glob("step_*[0-9]"))[:-1]:
            shutil.rmtree(old)

    def remove(self) -> None:
        shutil.rmtree(self.directory)
