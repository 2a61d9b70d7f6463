"""The common prefix of two sequences."""

from itertools import takewhile


def common(a, b):
    """How many leading items two sequences have in common."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))
