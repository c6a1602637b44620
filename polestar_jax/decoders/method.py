"""A named method: three parts, its defaults, and what there is to say about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polestar_jax import commit
from polestar_jax.decode.policy import Decoder
from polestar_jax.decode.sampling import Sampling
from polestar_jax.decoders.caches import CACHES
from polestar_jax.decoders.commits import COMMITS
from polestar_jax.decoders.part import COMMON, FILTERS, Part, lengths
from polestar_jax.decoders.schedules import SCHEDULES
from polestar_jax.errors import InputError
from polestar_jax.settings import Setting, checked

PARTS: dict[str, dict[str, Part]] = {"schedule": SCHEDULES, "cache": CACHES, "commit": COMMITS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A named method: how to build it, its settings, and where it comes from.

    Attributes:
      name: as ``polestar methods`` lists it.
      schedule, cache, commit: its parts by name; the settings of these names put another part in their place.
      summary: one line.
      source: the paper.
      cost: what a pass computes.
      deviations: where it differs from its authors' code, and why.
      defaults: settings whose default is not the part's.
      presets: what its presets change of the settings; the first is the default.
    """

    name: str
    schedule: str = "blocks"
    cache: str = "none"
    commit: str
    summary: str
    source: str
    cost: str
    deviations: tuple[str, ...] = ()
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    presets: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Setting]:
        """Its settings with its own parts."""
        return self.settings_with({})

    def settings_with(self, given: dict[str, Any]) -> dict[str, Setting]:
        """Its settings with the parts that are ``given``; InputError for one that is not known."""
        table = COMMON | FILTERS
        if self.presets:
            names = tuple(self.presets)
            table |= {"preset": Setting(type=str, default=names[0], choices=names, help="where the defaults come from")}
        for kind, parts in PARTS.items():
            default = getattr(self, kind)
            choice = Setting(type=str, default=default, choices=tuple(parts), help=_HELP[kind])
            part = choice.check(kind, given.get(kind, default))
            table = table | parts[part].settings | {kind: choice}
        changed = {name: value for name, value in self.defaults.items() if name in table}
        return table | {name: dataclasses.replace(table[name], default=value) for name, value in changed.items()}

    def settings_for(self, texts: Mapping[str, str]) -> dict[str, Setting]:
        """Its settings with the parts among the ``texts`` of settings by name."""
        return self.settings_with({kind: texts[kind].strip() for kind in PARTS if kind in texts})

    def parsed(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Settings from their texts; InputError for one that it does not have, or a value that is not accepted."""
        table = self.settings_for(texts)
        for name in texts:
            if name not in table:
                raise InputError(f"method {self.name} has no setting {name!r}; it has: {', '.join(table)}")
        return {name: table[name].parse(name, text) for name, text in texts.items()}

    def build(self, **settings: Any) -> Decoder:
        """The decoder with these settings.

        Raises:
          InputError: an unknown setting, a value that is not accepted, or settings that do not go together.
        """
        table = self.settings_with(settings)
        preset = settings.get("preset", next(iter(self.presets), None))
        changed = self.presets.get(preset, {}) if isinstance(preset, str) else {}
        values = checked(table, {name: changed[name] for name in changed if name in table} | settings, self.name)
        frame = lengths(values, whole=SCHEDULES[values["schedule"]].whole)
        schedule = SCHEDULES[values["schedule"]].build(values, frame)
        block_length = getattr(schedule, "block_length", frame.block_length)
        chosen = values | {"block_length": block_length}
        frame = frame._replace(block_length=block_length, capacity=schedule.capacity)
        rule = COMMITS[values["commit"]].build(values, frame)
        cache = CACHES[values["cache"]].build(values, frame._replace(rule=rule))
        if values.get("first_token") == "force":
            if values["schedule"] not in ("blocks", "whole"):
                raise InputError(
                    f"setting first_token=force is not accepted with schedule={values['schedule']}: a block's entry then scores "
                    "its first position alone, and that schedule goes by more"
                )
            rule = commit.ForcedEntry(rule)
        chosen |= {name: value for name, value in values.items() if chosen[name] is None}  # as the parts settled them
        fields = {field.name for field in dataclasses.fields(Sampling)}
        plain = ("gen_length", "guidance", "stop_at_eos", "kernels", "strict_kernels")
        return Decoder(
            name=self.name, schedule=schedule, cache=cache, commit=rule,
            sampling=Sampling(**{key: value for key, value in values.items() if key in fields}),
            chosen=tuple(chosen.items()), **{name: values[name] for name in plain},
        )  # fmt: skip


_HELP = {
    "schedule": "which positions may be committed",
    "cache": "which rows a pass computes",
    "commit": "which positions a pass commits",
}
