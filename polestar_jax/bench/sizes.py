"""Sizes of a random model, from words to a spec; without jax, for the command's help reads them."""

from __future__ import annotations

from typing import Any

from polestar_jax.errors import InputError
from polestar_jax.settings import Setting
from polestar_jax.spec import ModelSpec

# The defaults are the model called "mid".
SIZES = {
    "layers": Setting(type=int, default=8, low=1, high=1000, help="layers"),
    "d_model": Setting(type=int, default=512, low=2, high=2**16, help="width"),
    "heads": Setting(type=int, default=8, low=1, high=2**10, help="query heads"),
    "kv_heads": Setting(type=int, default=None, low=1, high=2**10, help="key/value heads; none: as many as query heads"),
    "d_ff": Setting(type=int, default=None, low=1, high=2**18, help="width of the MLP; none: 3 d_model, as in LLaDA"),
    "vocab": Setting(type=int, default=8192, low=8, high=999_999, help="vocabulary"),
    "family": Setting(type=str, default="llada", choices=("llada", "dream"), help="whose forward pass"),
}  # fmt: skip
MID = "mid"
MAX_LENGTH = 2**17


def parse_sizes(text: str) -> dict[str, Any]:
    """The sizes of ``mid``, ``layers=2,d_model=64`` or ``mid,layers=2``, every one of SIZES.

    Raises:
      InputError: a word that is no size, a value out of range, or sizes that do not go together.
    """
    values = {name: setting.default for name, setting in SIZES.items()}
    given: set[str] = set()
    for place, part in enumerate(text.split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if place == 0 and name == MID and not equals:
            continue
        if not equals or name not in SIZES:
            raise InputError(
                f"--random {part!r} is not accepted: {MID}, or SIZE=VALUE with a size of {', '.join(SIZES)}"
            )
        if name in given:
            raise InputError(f"--random: {name} is given twice")
        given.add(name)
        values[name] = SIZES[name].parse(name, value)
    values["kv_heads"] = values["kv_heads"] or values["heads"]
    values["d_ff"] = values["d_ff"] or 3 * values["d_model"]
    if values["heads"] % values["kv_heads"]:
        raise InputError(
            f"--random: kv_heads={values['kv_heads']} is not accepted: a divisor of heads={values['heads']}"
        )
    if values["d_model"] % (2 * values["heads"]):
        raise InputError(
            f"--random: d_model={values['d_model']} is not accepted: a multiple of {2 * values['heads']}, "
            f"an even width for each of {values['heads']} heads"
        )
    return values


def random_spec(sizes: dict[str, Any]) -> ModelSpec:
    """The spec of these sizes; the last ids are the special ones."""
    dream, vocab = sizes["family"] == "dream", sizes["vocab"]
    return ModelSpec(
        family=sizes["family"],
        d_model=sizes["d_model"],
        n_layers=sizes["layers"],
        n_heads=sizes["heads"],
        n_kv_heads=sizes["kv_heads"],
        head_dim=sizes["d_model"] // sizes["heads"],
        d_ff=sizes["d_ff"],
        vocab_size=vocab,
        max_length=MAX_LENGTH,
        rope_theta=1e6 if dream else 5e5,
        norm_eps=1e-6 if dream else 1e-5,
        qkv_bias=dream,
        logit_shift=int(dream),
        mask_id=vocab - 1,
        eos_id=vocab - 2,
        bos_id=None,
        stop_ids=(vocab - 2, vocab - 3),
    )
