"""Processor times of work units, for the pack strategy ``time``.

Every row tile of a pack is a work unit per KV head: it has a price of its own, and one for each step of the tile's n KV
tokens. A request with several parts pays for each that it deposits. KV that is loaded again has no price here: it comes
mostly from the L2 cache, and its steps are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from feather_kernels.errors import PlanError, is_number, is_whole
from feather_kernels.tiles import LATENT_TILES, TILES

# For an H200, tiles of the hopper path, by m; near what benchmarks/measure_unit_costs.py prints. A step is of the n in
# `tiles.TILES`.
UNIT_NS = {8: 480.0, 16: 600.0, 64: 1300.0, 128: 3500.0}
STEP_NS = {8: 170.0, 16: 220.0, 64: 1200.0, 128: 1400.0}
# The same of latent attention, whose tiles all have 64 rows: the best of seven sets on PAT's trees at 8 and 16 heads.
LATENT_UNIT_NS, LATENT_STEP_NS, LATENT_PART_ROW_NS = 2500.0, 1700.0, 60.0


@dataclass(frozen=True)
class UnitCosts:
    """The costs of units, steps and parts, in nanoseconds of one processor for one KV head.

    Attributes
    ----------
    unit, step : mapping of int to float
        Of a work unit, and of each step of n tokens in it, by the tile's m. A tile whose m is missing costs as much a
        row as the next smaller one; below the smallest, as much as that one.
    part, part_row : float
        Of a part that a request deposits, and of each of its G rows.

    Raises
    ------
    PlanError
        A cost that is negative or not finite, or a mapping without entries.
    """

    unit: Mapping[int, float] = field(default_factory=UNIT_NS.copy)
    step: Mapping[int, float] = field(default_factory=STEP_NS.copy)
    part: float = 0.0
    part_row: float = 60.0

    def __post_init__(self) -> None:
        tiles = [self.unit, self.step]
        whole = all(isinstance(costs, Mapping) and costs and all(map(is_whole, costs)) for costs in tiles)
        numbers = [self.part, self.part_row, *(cost for costs in tiles if whole for cost in costs.values())]
        if not whole or not all(is_number(cost) and 0 <= cost < math.inf for cost in numbers):
            raise PlanError(f"costs are {self}: give finite numbers of at least 0, unit and step for at least one m")

    @classmethod
    def default(cls, tiles: Sequence[tuple[int, int]]) -> UnitCosts:
        """The H200's for these tiles (m, n): a step of another n costs in proportion."""
        usual, steps = dict(TILES["hopper"]), {}
        for m, n in tiles:
            steps[m] = _of_rows(STEP_NS, m) * n / usual[_nearest(STEP_NS, m)]
        return cls(step=steps)

    @classmethod
    def latent(cls) -> UnitCosts:
        """The H200's for latent attention."""
        ((m, _),) = LATENT_TILES
        return cls({m: LATENT_UNIT_NS}, {m: LATENT_STEP_NS}, part_row=LATENT_PART_ROW_NS)

    def of_tiles(self, tiles: Sequence[tuple[int, int]]) -> list[float]:
        """Each tile's cost of a unit, then each tile's cost of a step."""
        return [_of_rows(costs, m) for costs in (self.unit, self.step) for m, _ in tiles]


def _nearest(costs: Mapping[int, float], m: int) -> int:
    """The largest m that has a cost, up to this one; the smallest, if all are larger."""
    return max((rows for rows in costs if rows <= m), default=min(costs))


def _of_rows(costs: Mapping[int, float], m: int) -> float:
    known = _nearest(costs, m)
    return float(costs[known] * max(m, known) / known)
