"""Bounds on the figures after a switch, as ``--keep`` gives them: ``ttft_p99<=1.1x,tok/s>=0.98x``."""

from __future__ import annotations

import re
from typing import NamedTuple

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.switching.metrics import FIGURES, Figures

_FORM = re.compile(r"([\w/]+)\s*(<=|>=)\s*(\d+(?:\.\d+)?)(x?)", re.ASCII)


class Bound(NamedTuple):
    """A limit of a figure: a multiple of what it was before the switch, or a value."""

    text: str
    figure: str
    is_most: bool
    value: float
    relative: bool

    def held(self, before: Figures, after: Figures) -> bool:
        """Whether the figure is within it; one that is not known is not."""
        old, new = before[self.figure], after[self.figure]
        if new is None or (self.relative and old is None):
            return False
        limit = self.value * (old or 0.0) if self.relative else self.value
        return new <= limit if self.is_most else new >= limit


def parse(text: str) -> list[Bound]:
    """Read the bounds; ``FeatherError`` for anything else."""
    bounds = []
    for part in text.split(","):
        found = _FORM.fullmatch(part.strip())
        if found is None or found[1] not in FIGURES:
            raise FeatherError(
                f"--keep {quoted(text, 100)}: {quoted(part.strip())} is no bound; expected some of "
                f"{', '.join(FIGURES)} with <= or >= and 1.1x (times the figure before) or a value, as ttft_p99<=1.1x"
            )
        bounds.append(Bound(part.strip(), found[1], found[2] == "<=", float(found[3]), bool(found[4])))
    return bounds
