"""Sums over priority classes, of which there may be as many as requests: clients may send a deadline as a priority."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

_BLOCK = 256  # classes that are moved or added up one by one
_first_of = itemgetter(0)


class PrioritySums:
    """An amount for each class, in blocks of neighbouring classes: a change or a sum touches one block, and totals."""

    def __init__(self) -> None:
        self._classes: list[list[int]] = [[]]  # rising; only a sole block may be empty
        self._amounts: list[list[float]] = [[]]
        self._totals: list[float] = [0]

    @property
    def first(self) -> int | None:
        """The most urgent class that has an amount."""
        return self._classes[0][0] if self._classes[0] else None

    @property
    def last(self) -> int | None:
        """The least urgent one."""
        return self._classes[-1][-1] if self._classes[-1] else None

    def set(self, priority: int, amount: float | None) -> None:
        """Note the amount of a class; None: it has none any more."""
        self._put(*self._find(priority), priority, amount)

    def add(self, priority: int, change: int) -> None:
        """Change a class's count; one of 0 is no class."""
        block, place, known = self._find(priority)
        self._put(block, place, known, priority, (self._amounts[block][place] if known else 0) + change or None)

    def _put(self, block: int, place: int, known: bool, priority: int, amount: float | None) -> None:
        classes, amounts = self._classes[block], self._amounts[block]
        if known and amount is not None:
            amounts[place] = amount
        elif known:
            del classes[place], amounts[place]
        elif amount is not None:
            classes.insert(place, priority)
            amounts.insert(place, amount)
        self._totals[block] = sum(amounts)
        if len(classes) > 2 * _BLOCK or (not classes and len(self._classes) > 1):
            here, cuts = slice(block, block + 1), range(0, len(classes), _BLOCK + 1)
            self._classes[here] = [classes[cut : cut + _BLOCK + 1] for cut in cuts]
            self._amounts[here] = [amounts[cut : cut + _BLOCK + 1] for cut in cuts]
            self._totals[here] = [sum(amounts[cut : cut + _BLOCK + 1]) for cut in cuts]

    def up_to(self, priority: int) -> float:
        """Return the sum over a class and all that are more urgent."""
        block, place, known = self._find(priority)
        return sum(self._totals[:block]) + sum(self._amounts[block][: place + known])

    def _find(self, priority: int) -> tuple[int, int, bool]:
        """Block and place of a class, and whether it is there."""
        block = bisect_right(self._classes, priority, 1, key=_first_of) - 1
        classes = self._classes[block]
        place = bisect_left(classes, priority)
        return block, place, place < len(classes) and classes[place] == priority
