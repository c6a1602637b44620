"""What made an evaluation's answers: the record that goes beside every number, and that a resumed evaluation must match."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from pallas_kernels import dispatch
from polestar_jax.bench import report
from polestar_jax.decode.policy import Decoder
from polestar_jax.decoders import METHODS, variants
from polestar_jax.eval import prompts, tasks
from polestar_jax.eval.records import Record
from polestar_jax.eval.run import Evaluation
from polestar_jax.eval.task import Task
from polestar_jax.models.denoiser import Denoiser


def record(
    work: Evaluation,
    *,
    prompt_mode: str,
    options: Mapping[str, Any],
    versions: Mapping[str, str],
    notes: Mapping[str, Any],
) -> Record:
    """The record of an evaluation: ``options`` are the task's, ``versions`` those that can change a result, ``notes`` what need
    not match. Files among the options are notes: their contents are in the items."""
    task, spec, machine = work.task, work.model.spec, report.machine()
    options = dict(task.defaults) | {key: _plain(value) for key, value in options.items()}
    files = {key: options.pop(key) for key in list(options) if key.endswith("_file")}
    subsets: dict[str, int] = {}
    for item in work.items:
        subsets[item.subset] = subsets.get(item.subset, 0) + 1
    alike = ("device", "platform", "devices", "xla_flags", *(("cpu",) if machine["platform"] == "cpu" else ()))
    about = {
        "task": {
            "name": task.name, "version": task.version, "shots": int(options.get("shots", task.shots)), "options": options,
            "items": len(work.items), "subsets": subsets, "digest": tasks.digest(work.items), "stop": list(task.stop),
            "runs_code": task.runs_code,
        },
        "model": {
            "family": spec.family, "layers": spec.n_layers, "d_model": spec.d_model, "parameters": spec.parameters,
            "weights": weights_digest(work.model),
        },
        "prompt_mode": prompt_mode,
        "prompts": prompts.digest(work.prompts),
        "post_processing": work.post,
        "dtype": str(work.model.dtype),
        "matmul_precision": "highest" if str(work.model.dtype) == "float32" else "default",
        "batch_size": work.batch_size,
        "seed": work.seed,
        "machine": {name: machine[name] for name in alike if name in machine},
        "kernels": dispatch.asked(),
        "versions": dict(versions) | scoring_versions(task),
    }  # fmt: skip
    runs = {key: run_record(key, decoder) for key, decoder in work.runs.items()}
    notes = dict(notes) | files | {"cores": machine["cores"], "timed": len(work.timed)}
    return Record(about=about, runs=runs, notes=notes)


def scoring_versions(task: Task) -> dict[str, str]:
    """Versions that decide about prompts and scores: of Python, which runs answers of code tasks, the tokenizers, and the task's
    packages that are installed."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("tokenizers", *task.packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _plain(value: Any) -> Any:
    """Digits as a number, as options come from the command line."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value


def run_record(key: str, decoder: Decoder) -> dict[str, Any]:
    """What is a run's own: method and every setting in force, and where the method differs from its authors' code."""
    settings = decoder.settings()
    return {
        "method": decoder.name,
        "source": METHODS[decoder.name].source,
        "gen_length": decoder.gen_length,
        "block_length": settings["block_length"],
        "steps": settings.get("steps"),
        "eos_rule": {name: settings.get(name) for name in ("eos", "stop_at_eos", "count_eos")},
        "cache_policy": settings["cache"],
        "commit_policy": settings["commit"],
        "asked": variants.parse_key(key)[1],
        "settings": settings,
        "deviations": list(METHODS[decoder.name].deviations),
    }


def weights_digest(model: Denoiser) -> str:
    """8 hexadecimal digits of all weights in their dtype, whichever layout they were read from."""
    state = nnx.to_flat_state(nnx.state(model))
    total = 0
    for path, leaf in sorted(state, key=lambda pair: str(pair[0])):
        array = np.ascontiguousarray(jax.device_get(leaf[...]))
        total = zlib.crc32(f"{path} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(array.view(np.uint8).data, total)
    return f"{total:08x}"


def revision(directory: Path) -> str | None:
    """The commit of a directory in the hub's cache (``snapshots/COMMIT``), where it is one."""
    name = directory.resolve().name
    return name if len(name) == 40 and set(name) <= set("0123456789abcdef") else None
