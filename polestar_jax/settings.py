"""Settings of the methods: their types, accepted values, defaults and meaning, in one place.

The decoders, ``--set key=value``, the refusals and ``polestar methods`` all read these tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polestar_jax.errors import InputError

LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a method.

    Attributes:
      type: int, float, bool, str, or tuple (of whole numbers).
      default: the value when not given; None where the meaning says what that stands for.
      low, high: inclusive bounds of a number; ``above`` makes the lower one exclusive; ``least`` is
        the smallest value beside 0. No number beyond LARGEST is accepted: it would not fit the device's types.
      none: what the value None stands for, where it is accepted beside a default.
      choices: accepted strings.
      help: one line.
    """

    type: type
    default: Any
    help: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    least: float | None = None
    none: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return self.default is None or self.none is not None

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        if self.choices:
            words = " | ".join(self.choices)
        elif self.type is bool:
            words = "true | false"
        elif self.type is tuple:
            words = "whole numbers with commas"
        else:
            bounds = [
                f"{sign} {bound:g}"
                for sign, bound in ((">=", self.low), (">", self.above), ("<=", self.high))
                if bound is not None
            ]
            words = " ".join(["a whole number" if self.type is int else "a number", " and ".join(bounds)]).strip()
            words += f" (0, or at least {self.least:g})" if self.least is not None else ""
        return words + (f" | none{f' ({self.none})' if self.none else ''}" if self.optional else "")

    def check(self, name: str, value: Any) -> Any:
        """The value in the setting's type, or InputError."""
        if value is None and self.optional:
            return None
        refuse = InputError(f"setting {name}={value!r} is not accepted: {self.accepted}")
        if self.type is tuple:
            whole = isinstance(value, (tuple, list)) and all(isinstance(x, (int, np.integer)) for x in value)
            if not whole or any(isinstance(x, bool) or not 0 <= x <= LARGEST for x in value):
                raise refuse
            return tuple(int(x) for x in value)
        if self.type is bool or self.type is str:
            if not isinstance(value, self.type) or (self.choices and value not in self.choices):
                raise refuse
            return value
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise refuse
        if abs(value) > LARGEST or value != value or (self.type is int and int(value) != value):
            raise refuse
        below = (self.low is not None and value < self.low) or (self.above is not None and value <= self.above)
        if (
            below
            or (self.high is not None and value > self.high)
            or (self.least is not None and 0 < value < self.least)
        ):
            raise refuse
        return self.type(value)

    def parse(self, name: str, text: str) -> Any:
        """The value of ``--set name=text``, or InputError."""
        lowered = text.strip().lower()
        if lowered in ("none", "null") and self.optional and "none" not in self.choices:
            return None
        refuse = InputError(f"setting {name}={text} is not accepted: {self.accepted}")
        if self.type is bool:
            if lowered not in ("true", "false"):
                raise refuse
            return lowered == "true"
        if self.type is str:
            return self.check(name, text)
        try:
            value = tuple(int(part) for part in text.split(",")) if self.type is tuple else self.type(text)
        except ValueError:
            raise refuse from None
        return self.check(name, value)


def checked(settings: dict[str, Setting], given: dict[str, Any], method: str) -> dict[str, Any]:
    """Defaults overlaid with ``given``; an unknown name or a value out of range is an InputError with what is known."""
    unknown = sorted(set(given) - set(settings))
    if unknown:
        raise InputError(f"method {method} has no setting {unknown[0]!r}; it has: {', '.join(settings)}")
    return {name: setting.check(name, given.get(name, setting.default)) for name, setting in settings.items()}
