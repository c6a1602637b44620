"""Who may import whom: kernels know nothing of the package, models nothing of policies, nothing imports ``convert`` eagerly."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("polestar_jax", "pallas_kernels", "convert")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(path: pathlib.Path, *, inside: bool) -> set[str]:
    """Modules a file imports: at its top level, or also inside functions; type-checking imports are left out."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if inside else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("module", MODULES)
def test_import_rules(module):
    everywhere, eager = imports(MODULES[module], inside=True), imports(MODULES[module], inside=False)
    starts = lambda names, *prefixes: {n for n in names for p in prefixes if n == p or n.startswith(p + ".")}  # noqa: E731
    if module.startswith("pallas_kernels"):
        assert not starts(everywhere, "polestar_jax", "convert")
    if module.startswith("polestar_jax.models"):
        assert not starts(
            everywhere, *(f"polestar_jax.{m}" for m in ("decode", "commit", "cache", "schedule", "decoders"))
        )
    if module.startswith("polestar_jax") and module not in ("polestar_jax.cli.convert", "polestar_jax.cli.verify"):
        assert not starts(eager, "convert")
    if module in ("polestar_jax.commit", "polestar_jax.cache", "polestar_jax.schedule"):
        assert not starts(everywhere, "polestar_jax.decode.engine", "polestar_jax.decoders", "polestar_jax.generation")
    assert not starts(everywhere, "torch"), "no torch anywhere"


def test_modules_stay_small():
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {m: n for m, n in lengths.items() if n > 400} == {}
