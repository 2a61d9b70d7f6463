"""Lines of cells as a table of plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def aligned(lines: Sequence[Sequence[str]], pad: Callable[[str, int], str]) -> str:
    """One line of text for each of cells; ``pad`` is ``str.ljust`` or ``str.rjust``."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(pad, line, widths)).rstrip() for line in lines)
