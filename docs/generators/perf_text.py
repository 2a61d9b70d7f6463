"""Markdown of the performance pages: tables with their captions, sections, pages and links to the glossary."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

MADE = "<!-- Made by docs/generators/performance.py from docs/measured; edit those. -->"
TERMS = {  # by their anchor in the glossary
    "workloads": "W1 to W7",
    "tree-notation": "notation of trees",
    "floor": "floor",
    "chunk": "chunk",
    "group": "group",
    "ttft": "TTFT",
    "tbt": "TBT",
    "share-within-the-bounds": "requests within the bounds",
}
LIMITS = ("--time-limit", "--case-limit", "--start-timeout", "--json", "--plot", "--logs")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns of numbers stand right."""
    columns = list(zip(*rows, strict=True))[1:] or [()] * (len(head) - 1)
    rule = ["---", *("--:" if all(map(_figure, column)) else "---" for column in columns)]
    return "\n".join("|" + "|".join(line) + "|" for line in (head, rule, *rows))


def _figure(cell: str) -> bool:
    return len(cell) <= 28 and cell.lstrip("*")[:1] in "-0123456789"


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


def term(anchor: str, text: str = "", up: str = "../") -> str:
    """A word linked to the glossary; `up` leads from the page to ``docs/``."""
    return f"[{text or TERMS[anchor]}]({up}reference/glossary.md#{anchor})"


def caption(where: str, *anchors: str, up: str = "../") -> str:
    """Below a table or a chart: what it was measured on, and where its terms are explained."""
    explained = f" Terms: {', '.join(term(anchor, up=up) for anchor in anchors)}." if anchors else ""
    return f"*{where}.*{explained}"


@dataclass(frozen=True)
class Section:
    """One subject of a page: its paragraphs and tables, the files that were read and the commands that made them."""

    title: str
    body: list[str]
    files: Sequence[str] = ()
    commands: Sequence[str] = ()

    def markdown(self) -> str:
        """The section as it stands on the page."""
        parts = [f"## {self.title}", *self.body]
        if self.files:
            parts.append(
                f"Result files in `docs/measured`: {', '.join(f'`{name}`' for name in dict.fromkeys(self.files))}."
            )
        if self.commands:
            parts += ["Measured by:", "\n".join(["```", *self.commands, "```"])]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Page:
    """A page below the front page: a sentence or two, then its sections."""

    title: str
    lead: str
    sections: Sequence[Section]

    def markdown(self) -> str:
        """The whole page."""
        parts = [f"{MADE}\n# {self.title}", self.lead, *(section.markdown() for section in self.sections)]
        return "\n\n".join(parts) + "\n"


def number(value: float) -> str:
    """Whole, with thousands; small ones with the digits that tell them apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
