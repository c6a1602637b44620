"""The small files that travel with the weights: configuration, tokenizer, chat template. Never code, never pickles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from convert.dtypes import DTYPE_NAMES
from polestar_jax.jsonfile import load_json
from polestar_jax.tokenization.files import TOKENIZER_FILES

_NAMES = ("config.json", "generation_config.json", *TOKENIZER_FILES)


def copy_side_files(source: Path, destination: Path, dtype: str | None) -> list[str]:
    """Copy what there is; where weights are cast to ``dtype`` (safetensors' name), config.json says so too.

    Returns:
      The names copied.
    """
    names = [name for name in _NAMES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, destination / name)
    if dtype is not None and "config.json" in names:
        _set_dtype(destination / "config.json", next(word for word, tag in DTYPE_NAMES.items() if tag == dtype))
    return names


def _set_dtype(path: Path, word: str) -> None:
    config = load_json(path)
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    if keys:
        config.update(dict.fromkeys(keys, word))
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
