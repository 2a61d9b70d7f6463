"""Markdown of the performance page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

LIMITS = ("--time-limit", "--case-limit", "--start-timeout", "--json", "--plot", "--logs")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose numbers stand right."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("|" + "|".join(line) + "|" for line in (head, rule, *rows))


def command(text: str, most: int = 1) -> str:
    """A benchmark's command as it is typed: the first of many cases, and nothing about its files and time limits."""
    words = shlex.split(text)
    folder = {"bench": "benchmarks", "check": "benchmarks/checks"}.get(words[0].partition("_")[0]) if words else None
    if folder:
        words = ["python", f"{folder}/{words[0]}", *words[1:]]
    for flag in LIMITS:
        if flag in words[:-1]:
            del words[words.index(flag) : words.index(flag) + 2]
    words = [word for word in words if word != "--quiet"]
    if "--case" in words:
        first = words.index("--case") + 1
        last = next((place for place in range(first, len(words)) if words[place].startswith("--")), len(words))
        if last - first > most:
            words[first + most : last] = ["..."]
    return shlex.join(words)


@dataclass(frozen=True)
class Section:
    """One claim: title, paragraphs, what it was measured on, and the commands that measured it."""

    title: str
    body: list[str]
    setup: str
    commands: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # what all was read; each names its own command

    def markdown(self) -> str:
        """The section as it stands on the page."""
        files = f"Files: {', '.join(f'`{name}`' for name in self.files)}." if self.files else ""
        parts = [f"## {self.title}", *self.body, f"{self.setup} {files}".strip()]
        if self.commands:
            parts.append("\n".join(["```", *self.commands, "```"]))
        return "\n\n".join(part for part in parts if part)


def number(value: float) -> str:
    """Whole, with thousands; small ones with the digits that tell them apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
