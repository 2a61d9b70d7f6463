"""English prompts that share prefixes, as token ids: Python's own reference manual, cut to a given shape.

The manual is in every Python, as the text that ``help()`` shows. Token ids rather than text are sent, so that lengths
and prefixes are exactly what the shape says.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

QUESTIONS = (
    "\n\nIn short, the text above says that",
    "\n\nQuestion: What is described here?\nAnswer:",
    "\n\nThe most important rule in this section is",
    "\n\nExample:\n\n",
    "\n\nSummary for beginners:",
    "\n\nA common mistake is to",
)


@dataclass(frozen=True)
class Branch:
    """A shared piece of text, and how long each text is that goes on from it; branches may grow on branches."""

    tokens: int
    tails: tuple[int, ...] = ()
    branches: tuple[Branch, ...] = ()


# None of the shared lengths is a multiple of 32, in which sharing is found, nor of a page.
SHAPE = (
    Branch(603, (25, 40, 75, 110, 30, 58)),
    Branch(301, (90, 33, 64, 150)),
    Branch(790, (70,), (Branch(310, (28, 50, 96, 200)), Branch(205, (45, 31, 130)))),
    Branch(450, (0, 0)),  # the same prompt twice
    Branch(0, (100, 420, 900, 1450)),  # nothing in common
)
PROMPTS = 24
FIRST_TOKEN = 16  # of a vocabulary without a tokenizer; those before it may be special


def prompts(encode: Callable[[str], list[int]], rounds: int = 1, scale: float = 1.0) -> dict[str, list[int]]:
    """Prompts by name, `PROMPTS` a round; later rounds share the first one's prefixes and have tails of their own.

    Parameters
    ----------
    encode : token ids of a text, without special tokens.
    scale : factor of all lengths.
    """
    text = _Text(encode)
    questions = [encode(question) for question in QUESTIONS]

    def leaves(branch: Branch, before: list[int]) -> Iterator[tuple[list[int], int]]:
        shared = before + text.take(round(branch.tokens * scale))
        for tail in branch.tails:
            yield shared, tail
        for other in branch.branches:
            yield from leaves(other, shared)

    every = [leaf for branch in SHAPE for leaf in leaves(branch, [])]
    made: dict[str, list[int]] = {}
    for number in range(rounds):
        for index, (shared, tail) in enumerate(every):
            # Prompts without a tail stay the same from round to round, as questions that users ask again do.
            ending = questions[(index + number) % len(questions)] if tail else questions[0]
            piece = text.take(max(1, round(tail * scale) - len(ending))) if tail else []
            made[f"p{number}-{index:02}"] = [*shared, *piece, *ending]
    return made


class _Text:
    """The manual, piece by piece; encoded as far as it is needed."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._topics = (" ".join(topics[name].split()) for name in sorted(topics))
        self._tokens: list[int] = []

    def take(self, count: int) -> list[int]:
        while len(self._tokens) < count:
            self._tokens += self._encode(next(self._topics) + "\n\n")
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        return taken


def encoder(model: Path) -> Callable[[str], list[int]]:
    """The encoder of a model's ``tokenizer.json``; without one, each word has one token of the vocabulary."""
    if not (model / "tokenizer.json").is_file():
        kinds = json.loads((model / "config.json").read_text())["vocab_size"] - FIRST_TOKEN
        return lambda text: [FIRST_TOKEN + zlib.crc32(word.encode()) % kinds for word in text.split()]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
