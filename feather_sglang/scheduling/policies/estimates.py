"""Estimates of a state's two actions: means, counts, spread, and when STOP counts as proven better.

A cell is ``[mean_add, n_add, mean_stop, n_stop, spread]``: means in the unit of the reward (tokens/s), counts of
rewards (not of decisions; weighted and discounted), and the mean squared deviation from the action's mean.
"""

from __future__ import annotations

from math import sqrt

NEW_CELL = (0.0, 0.0, 0.0, 0.0, 0.0)
FORGOTTEN = 1e-9  # a discounted count below this says nothing any more

# Until a state has shown its own spread: as if four rewards had deviated by a tenth.
_PRIOR_SPREAD = 0.1**2
_PRIOR_WEIGHT = 4.0
# Standard errors by which STOP must lead. It is looked at again after every reward, so two would often err.
_SIGMAS = 3.0


def learn(cell: list[float], stop: int, reward: float, weight: float, most: float, discount: float = 1.0) -> None:
    """Take one reward of ADD (`stop` 0) or STOP (1) into the cell.

    `weight`, 0 to 1, is what the reward counts for; `most` caps the count, and thereby sets the smallest step by which
    the mean follows (1 / most); `discount` multiplies the evidence that was there for both actions.
    """
    cell[1] *= discount
    cell[3] *= discount
    if weight <= 0.0:
        return
    mean, count = 2 * stop, 2 * stop + 1
    cell[count] = min(cell[count] + weight, most)
    step = weight / cell[count]
    surprise = reward - cell[mean]
    cell[mean] += surprise * step
    cell[4] += (surprise * surprise * (1.0 - step) - cell[4]) * weight / (cell[1] + cell[3])


def lead(cell: list[float], margin: float) -> tuple[float, bool]:
    """STOP's lead over ADD plus `margin`, as a share of the larger mean, and whether it is proven.

    Both actions must have been measured.
    """
    add, n_add, stop, n_stop, spread = cell
    scale = add if add > stop else stop
    if scale <= 0:
        return -margin, False
    gain = (stop - add) / scale - margin
    if gain <= 0:
        return gain, False
    variance = spread / (scale * scale) + _PRIOR_SPREAD * _PRIOR_WEIGHT / (n_add + n_stop)
    # While STOP is the habit, ADD's rewards weigh next to nothing; the few there were still are a measurement.
    return gain, gain > _SIGMAS * sqrt(variance * (1.0 / max(n_add, 1.0) + 1.0 / n_stop))
