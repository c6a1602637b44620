"""Methods side by side: which runs are asked for, with their settings, and a run a value where one is swept.

A run's key says what it is: ``parallel``, ``polestar[alpha=5]``, ``polestar[refresh_step=-1,alpha=5]``. Keys are also how
variants of a method are asked for. Settings that change together are joined by colons, and so are their values:
``window_prefix:window_suffix=64:32``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polestar_jax.decode.policy import Decoder
from polestar_jax.decoders import METHODS
from polestar_jax.decoders.schedules import SCHEDULES
from polestar_jax.errors import InputError
from polestar_jax.settings import Setting

Texts = dict[str, str]
# A cache may be slower than both of these; no method is called faster than the first where one of them was not measured too.
BASELINES = ("vanilla", "parallel")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One setting, or several joined by colons, and the texts of the values; of one method, or of all that have it."""

    method: str | None
    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"--sweep {self.method + '.' if self.method else ''}{self.key}={','.join(self.values)}"


def is_baseline(name: str, method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a run of a method with these settings is the baseline ``name``: its parts and its pace are the default ones."""
    if method != name:
        return False
    lengths = {key: settings[key] for key in ("gen_length", "block_length") if settings.get(key)}
    plain = METHODS[name].build(**lengths).settings()
    return all(settings.get(key) == plain.get(key) for key in ("schedule", "cache", "commit", "steps", "threshold"))


def parse_key(key: str) -> tuple[str, Texts]:
    """(method, settings by name) of a run's key."""
    found = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]*)\])?", key)
    pairs = [part.strip().partition("=") for part in (found[2] or "").split(",")] if found and found[2] else []
    if not found or not all(name and equals and value for name, equals, value in pairs):
        raise InputError(f"method {key!r} is not accepted: NAME or NAME[KEY=VALUE,...]")
    if len({name for name, _, _ in pairs}) != len(pairs):
        raise InputError(f"method {key!r} names a setting twice")
    return found[1].strip(), {name: value for name, _, value in pairs}


def run_key(method: str, settings: Mapping[str, str]) -> str:
    """The key of a run; the inverse of :func:`parse_key`."""
    return f"{method}[{','.join(f'{name}={value}' for name, value in settings.items())}]" if settings else method


def parse_sweep(text: str) -> Sweep:
    """``KEY=A,B,C`` or ``METHOD.KEY=A,B,C``."""
    where, _, values = text.partition("=")
    method, dot, key = where.rpartition(".")
    parts = tuple(value.strip() for value in values.split(","))
    if not key or (dot and not method) or not all(parts):
        raise InputError(f"--sweep {text} is not accepted: KEY=A,B,... or METHOD.KEY=A,B,...")
    return Sweep(method if dot else None, key, parts)


def apart(texts: Mapping[str, str]) -> Texts:
    """The texts with joined settings one by one; InputError where their values are not as many, or one is there twice."""
    found: Texts = {}
    for joined, together in texts.items():
        keys, values = joined.split(":"), together.split(":")
        if len(keys) != len(values):
            raise InputError(
                f"setting {joined}={together} is not accepted: {len(keys)} values with colons between them"
            )
        for key, value in zip(keys, values, strict=True):
            if key in found:
                raise InputError(f"setting {key} is given twice: {found[key]} and {value}")
            found[key] = value.strip()
    return found


def build(
    methods: str, settings: Sequence[str] = (), sweeps: Sequence[str] = (), *,
    gen_length: int, block_length: int | None = None, block_default: int = 32,
) -> dict[str, Decoder]:  # fmt: skip
    """The decoders of the runs by key, in order.

    Args:
      methods: names with commas, each with its own settings in brackets if it has any; "all" for all of them.
      settings: texts ``KEY=VALUE`` (for every method that has the key) and ``METHOD.KEY=VALUE``.
      sweeps: texts ``KEY=A,B,...``. A method that has the key gets a run for each value in place of its plain one; of
        several sweeps one after the other.
      gen_length: of all methods.
      block_length: of all methods; default: ``block_default``, but for methods that do not go by blocks.

    Raises:
      InputError: an unknown method or setting, a value that is not accepted, or a run that is there twice.
    """
    names = [name for part in _split(methods) for name in (METHODS if part == "all" else (part,))]
    wanted = [parse_key(name) for name in names]
    for name, _ in wanted:
        if name not in METHODS:
            raise InputError(f"unknown method {name!r}; methods: all, {', '.join(METHODS)}")
    general, own = _given(settings, [name for name, _ in wanted])
    asked = [parse_sweep(text) for text in sweeps]
    texts = [(name, inline, general | own[name] | apart(inline)) for name, inline in wanted]
    tables = [METHODS[name].settings_for(all_texts) for name, _, all_texts in texts]
    _check_known(general, own, asked, wanted, tables)
    lengths = {"gen_length": gen_length} | ({"block_length": block_length} if block_length else {})
    found: dict[str, Decoder] = {}
    for (name, inline, all_texts), table in zip(texts, tables, strict=True):
        swept = [sweep for sweep in asked if sweep.method in (None, name) and set(sweep.key.split(":")) <= set(table)]
        METHODS[name].parsed(
            {key: text for key, text in all_texts.items() if key in table}
        )  # also what a sweep overrides
        for more in [{sweep.key: value} for sweep in swept for value in sweep.values] or [{}]:
            shown = inline | more
            decoder, parsed = _build(name, all_texts | apart(more), apart(shown), lengths, block_default)
            key = run_key(
                name, {joined: ":".join(_text(parsed[part]) for part in joined.split(":")) for joined in shown}
            )
            if key in found:
                raise InputError(f"run {key} is asked for twice")
            found[key] = decoder
    return found


def _split(methods: str) -> list[str]:
    """At the commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", methods)]


def _given(texts: Sequence[str], names: list[str]) -> tuple[Texts, dict[str, Texts]]:
    """The texts of ``--set`` by key: those for every method that has the key, and those of one method."""
    general: Texts = {}
    own: dict[str, Texts] = {name: {} for name in names}
    for text in texts:
        where, equals, value = text.partition("=")
        method, dot, key = where.rpartition(".")
        if not equals or not key:
            raise InputError(f"--set {text} is not accepted: KEY=VALUE or METHOD.KEY=VALUE")
        if dot and method not in own:
            raise InputError(f"--set {text}: {method!r} is none of the methods {', '.join(own)}")
        place = own[method] if dot else general
        if place.setdefault(key, value) != value:
            raise InputError(f"setting {where} is given twice: {place[key]} and {value}")
    return general, own


def _check_known(
    general: Texts, own: dict[str, Texts], sweeps: list[Sweep], wanted: list[tuple[str, Texts]],
    tables: list[dict[str, Setting]],
) -> None:  # fmt: skip
    """Refuse a setting that no method it is for has, and sweeps of what a key cannot hold."""
    known: dict[str, dict[str, Setting]] = {}
    for (name, _), table in zip(wanted, tables, strict=True):
        known[name] = known.get(name, {}) | table
    asked = [(key, list(known)) for key in general] + [(key, [name]) for name in own for key in own[name]]
    for sweep in sweeps:
        if sweep.method is not None and sweep.method not in known:
            raise InputError(f"{sweep}: {sweep.method!r} is none of the methods {', '.join(known)}")
        where, keys = [sweep.method] if sweep.method else list(known), sweep.key.split(":")
        asked += [(key, where) for key in keys]
        there = set().union(*(known[name] for name in where))
        if set(keys) <= there and not any(set(keys) <= set(known[name]) for name in where):
            raise InputError(f"{sweep}: none of {', '.join(where)} has all of {', '.join(keys)}")
    for key, where in asked:
        there = sorted({name for method in where for name in known[method]})
        if key not in there:
            raise InputError(f"no setting {key!r} in {', '.join(where)}; there is: {', '.join(there)}")
    swept = [sweep.key for sweep in sweeps] + [joined for _, inline in wanted for joined in inline]
    for key in (key for joined in swept for key in joined.split(":")):
        if any(key in table and table[key].type is tuple for table in known.values()):
            raise InputError(f"setting {key} is a list and cannot be part of a run's key: use --set METHOD.{key}=...")


def _build(
    name: str, texts: Texts, inline: Texts, lengths: dict[str, int], block_default: int
) -> tuple[Decoder, dict[str, Any]]:
    """(decoder, its given settings); a text of ``--set`` that this method has no use for is left out, one of its own is not."""
    method = METHODS[name]
    table = method.settings_for(texts)
    parsed = method.parsed({key: text for key, text in texts.items() if key in table or key in inline})
    schedule = parsed.get("schedule", method.schedule)
    given = lengths | parsed
    if "block_length" not in given and not SCHEDULES[schedule].whole:
        given["block_length"] = min(block_default, given["gen_length"])
    return method.build(**given), parsed


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
