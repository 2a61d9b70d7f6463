"""The rule by which the server check counts two greedy answers as the same, without a server.

Two right backends round differently, so greedy tokens may part where two tokens are nearly as likely. How far rounding
goes is not guessed but measured, as the *spread* between two of SGLang's own backends on the same prompts:

- up to the first token that differs, the logprobs of the chosen tokens differ from the reference's by at most twice
  the spread, the largest and the mean each by twice its own (one position may be off by chance, the mean is not);
- where tokens part, the reference itself must have held the other token for nearly as likely as its own: a gap of at
  most twice the largest spread, as both logprobs may move, in opposite directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

FACTOR = 2.0


class Answer(NamedTuple):
    """Greedy tokens, their logprobs, and at each position the most likely tokens with theirs."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()


Answers = Mapping[str, Answer]


class Spread(NamedTuple):
    """Differences between logprobs of the same tokens after the same text.

    Attributes
    ----------
    positions : so many were compared.
    equal : answers without a different token, of `answers`.
    """

    largest: float
    mean: float
    positions: int
    equal: int
    answers: int


class Divergence(NamedTuple):
    """The first token of an answer that is not the reference's.

    Attributes
    ----------
    gap : by how much the reference's own token is more likely to it, as a difference of logprobs; infinite where the
        other token is not even among its most likely.
    """

    name: str
    position: int
    gap: float


@dataclass
class Verdict:
    """One comparison. `near_ties` are accepted divergences; `wrong` describes the others."""

    spread: Spread
    near_ties: list[Divergence] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def largest_gap(self) -> float:
        """Of the accepted divergences."""
        return max((tie.gap for tie in self.near_ties), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {
            "spread": self.spread._asdict(),
            "near_ties": [tie._asdict() for tie in self.near_ties],
        }


@dataclass(frozen=True)
class Tolerance:
    """The accepted differences of a backend, by the measured spread.

    Attributes
    ----------
    floor : what is accepted in any case; for arithmetic so exact that the spread is mere chance.
    """

    spread: Spread
    floor: float = 0.0

    @property
    def largest(self) -> float:
        return max(FACTOR * self.spread.largest, self.floor)

    @property
    def mean(self) -> float:
        return max(FACTOR * self.spread.mean, self.floor)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def spread(first: Answers, second: Answers) -> Spread:
    """How far the logprobs of two backends lie apart, over positions before any divergence."""
    differences: list[float] = []
    equal = 0
    for name, answer in first.items():
        other = second[name]
        same = common(answer.tokens, other.tokens)
        equal += same == max(len(answer.tokens), len(other.tokens))
        differences += [abs(a - b) for a, b in zip(answer.logprobs[:same], other.logprobs[:same], strict=True)]
    mean = math.fsum(differences) / len(differences) if differences else 0.0
    return Spread(max(differences, default=0.0), mean, len(differences), equal, len(first))


def divergence(name: str, tokens: Sequence[int], reference: Answer) -> Divergence | None:
    """Where tokens leave the reference, which may be longer; None if they do not."""
    position = common(tokens, reference.tokens)
    if position == len(tokens):
        return None
    if position == len(reference.tokens):
        return Divergence(name, position, math.inf)  # longer than anything it could be compared with
    top = reference.top[position] if position < len(reference.top) else {}
    gap = reference.logprobs[position] - top[tokens[position]] if tokens[position] in top else math.inf
    return Divergence(name, position, gap)


def judge(got: Answers, reference: Answers, tolerance: Tolerance) -> Verdict:
    """Compare all answers of a backend with the reference's."""
    verdict = Verdict(spread(got, {name: reference[name] for name in got}))
    for name, answer in got.items():
        if len(answer.tokens) != len(reference[name].tokens):
            verdict.wrong.append(f"{name}: {len(answer.tokens)} tokens, not {len(reference[name].tokens)}")
        elif not all(map(math.isfinite, answer.logprobs)):
            verdict.wrong.append(f"{name}: a logprob is not finite")
        elif (found := divergence(name, answer.tokens, reference[name])) is not None:
            accept(found, tolerance, verdict)
    for what, value, limit in (
        ("largest", verdict.spread.largest, tolerance.largest),
        ("mean", verdict.spread.mean, tolerance.mean),
    ):
        if not value <= limit:
            verdict.wrong.append(f"logprobs: {what} difference {value:.3g}, allowed {limit:.3g}")
    return verdict


def shown_nothing(reference: Answers) -> list[str]:
    """Why answers of a model with random weights cannot tell a right backend from a wrong one; empty if they can."""
    reasons = []
    different = len({answer.tokens for answer in reference.values()})
    if different < len(reference) // 2:
        reasons.append(f"the reference has {different} answers to {len(reference)} prompts: nothing is shown")
    repeating = sum(len(set(answer.tokens)) == 1 for answer in reference.values())
    if repeating > len(reference) // 2:
        reasons.append(f"{repeating} answers of the reference are one token over and over: nothing is shown")
    return reasons


def accept(found: Divergence, tolerance: Tolerance, verdict: Verdict) -> bool:
    """Whether a divergence is a near tie; noted in the verdict either way."""
    if found.gap <= tolerance.largest:
        verdict.near_ties.append(found)
        return True
    verdict.wrong.append(
        f"{found.name}: another token at {found.position}, which the reference holds for less likely by "
        f"{found.gap:.3g}, allowed {tolerance.largest:.3g}"
    )
    return False
