"""Sums over priority classes, of which there may be as many as requests: clients may send a deadline as a priority."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import itemgetter

_BLOCK = 256  # classes that are moved or added up one by one
_first_of = itemgetter(0)


class PrioritySums:
    """An amount for each class, in blocks of neighbouring classes: a change or a sum touches one block, and totals."""

    def __init__(self) -> None:
        self._amounts: dict[int, float] = {}
        self._classes: list[list[int]] = [[]]  # rising; only a sole block may be empty
        self._totals: list[float] = [0]  # of each block; nobody asks for it where there is one class

    @property
    def first(self) -> int | None:
        """The most urgent class that has an amount."""
        return self._classes[0][0] if self._amounts else None

    @property
    def last(self) -> int | None:
        """The least urgent one."""
        return self._classes[-1][-1] if self._amounts else None

    def add(self, priority: int, change: int) -> None:
        """Change a class's count; one of 0 is no class."""
        self.set(priority, self._amounts.get(priority, 0) + change or None)

    def set(self, priority: int, amount: float | None) -> None:
        """Note the amount of a class; None: it has none any more."""
        amounts, known = self._amounts, priority in self._amounts
        if amount is not None:
            amounts[priority] = amount
            if known and len(amounts) == 1:
                return
        elif amounts.pop(priority, None) is None:
            return
        block = bisect_right(self._classes, priority, 1, key=_first_of) - 1
        classes = self._classes[block]
        if amount is None:
            classes.remove(priority)
        elif not known:
            insort(classes, priority)
        self._totals[block] = self._total(classes)
        if len(classes) > 2 * _BLOCK or (not classes and len(self._classes) > 1):
            cuts = [classes[cut : cut + _BLOCK + 1] for cut in range(0, len(classes), _BLOCK + 1)]
            self._classes[block : block + 1] = cuts
            self._totals[block : block + 1] = map(self._total, cuts)

    def _total(self, classes: list[int]) -> float:
        return sum(map(self._amounts.__getitem__, classes))

    def up_to(self, priority: int) -> float:
        """Return the sum over a class and all that are more urgent."""
        block = bisect_right(self._classes, priority, 1, key=_first_of) - 1
        classes = self._classes[block]
        before = sum(self._totals[:block])
        return before + sum(map(self._amounts.__getitem__, classes[: bisect_right(classes, priority)]))
