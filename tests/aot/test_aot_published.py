"""The published specs are what the published configuration files say."""

from __future__ import annotations

import json
import pathlib

import pytest

from polestar_jax.config import spec_from_config
from polestar_jax.models.published import PUBLISHED

CONFIGS = pathlib.Path(__file__).parents[1] / "data" / "configs"


@pytest.mark.parametrize(("name", "file"), [("llada-8b", "llada_8b_instruct"), ("dream-7b", "dream_v0_instruct_7b")])
def test_spec_equals_the_configuration_file(name, file):
    config = json.loads((CONFIGS / f"{file}.json").read_text())
    assert PUBLISHED[name] == spec_from_config(config, source=file)
