"""The parameters of a policy: names, defaults, bounds, and the errors a user reads when one is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from feather_sglang.errors import FeatherError, quoted


class Number(NamedTuple):
    """A bounded number; `integer` where a fraction has no meaning."""

    default: float
    low: float
    high: float
    integer: bool = False

    def check(self, name: str, value: Any) -> float:
        """Return `value` as a number within the bounds, or raise FeatherError."""
        kind = int if self.integer else float
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (self.integer and value % 1):
            raise FeatherError(f"{name}={repr(value)[:40]} must be {'an integer' if self.integer else 'a number'}")
        if not self.low <= value <= self.high:  # true for NaN too
            raise FeatherError(f"{name}={repr(value)[:40]} must lie between {self.low:g} and {self.high:g}")
        return kind(value)


Spec = Mapping[str, Number]


def checked(policy: str, spec: Spec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters of `policy`: those `given`, checked, and the defaults of the others."""
    for name in given:
        if name not in spec:
            choices = ", ".join(spec) or "none"
            raise FeatherError(f"policy {policy} has no parameter {quoted(name)}: its parameters are {choices}")
    return {name: kind.check(f"policy {policy}: {name}", given.get(name, kind.default)) for name, kind in spec.items()}
