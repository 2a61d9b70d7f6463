"""What modes are worth on traffic that they were not trained on, beside fixed modes; as a table and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.modes.load import KEYS
from feather_sglang.scheduling.modes.mode import DEFAULT, Mode
from feather_sglang.scheduling.modes.mode_policy import ModePolicy

FLOOR = 0.05  # of the requests, added to those within the bounds: none and few are not worlds apart
LEARNT = "learnt"
FIGURES = ("output_tok_s", "ttft_mean", "ttft_p99", "tbt_p99_ms", "slo_share", "goodput")
BESIDE = 3  # fixed modes that are judged, too: the best where they were trained


class Judge(Protocol):
    """Replays cases under tables of modes."""

    @property
    def cases(self) -> Mapping[str, Any]:
        """By name."""

    def figures(self, policies: Mapping[str, ModePolicy]) -> Mapping[str, Mapping[str, Any]]:
        """Of each policy, by its label, the figures of each case."""


def mean(values: Mapping[str, float]) -> float:
    """The mean over cases."""
    return sum(values.values()) / len(values)


def judgement(judge: Judge, policy: ModePolicy, fixed: Sequence[Mode]) -> dict[str, Any]:
    """The policy beside fixed modes; `fixed` are those that were tried, the best in training first."""
    modes = [mode for mode in dict.fromkeys([*fixed[:BESIDE], DEFAULT]) if policy.table or mode != policy.default]
    tables = {LEARNT: policy, **{str(mode): ModePolicy({}, mode) for mode in modes}}
    figures = judge.figures(tables)
    rows = {
        name: {label: {key: one[name].get(key) for key in FIGURES} for label, one in figures.items()}
        for name in judge.cases
        if all(name in one for one in figures.values())
    }
    # The rival is the fixed mode that is best here, which nobody could have known.
    worth = {
        label: mean({name: math.log(row[label]["slo_share"] + FLOOR) for name, row in rows.items()})
        for label in figures
    }
    best = max((str(mode) for mode in modes), key=worth.__getitem__)
    gains = {
        name: (row[LEARNT]["slo_share"] + FLOOR) / (row[best]["slo_share"] + FLOOR) - 1 for name, row in rows.items()
    }
    table = {key: str(policy.table[key]) for key in KEYS if key in policy.table}
    return {
        "default": str(policy.default),
        "table": table,
        "best_fixed": best,
        "gain": math.exp(worth[LEARNT] - worth[best]) - 1,
        "worst": min(gains.values()),
        "cases": rows,
    }


def read(path: Path) -> dict[str, Any]:
    """An earlier judgement."""
    try:
        judged = json.loads(path.read_bytes())
    except OSError as error:
        raise FeatherError(f"--show {path}: cannot read: {error.strerror}") from None
    except ValueError:
        judged = None
    if (
        not isinstance(judged, dict)
        or not {"cases", "best_fixed", "gain", "worst", "curve", "validation"} <= judged.keys()
    ):
        raise FeatherError(f"--show {path}: no judgement of feather learn")
    return judged


def heading(judged: Mapping[str, Any]) -> str:
    """The answer in a line."""
    gain, worst = judged["gain"], judged["worst"]
    return f"held out: {gain:+.1%} within the bounds to {judged['best_fixed']} always, {worst:+.1%} in the worst case"


def rows(judged: Mapping[str, Any]) -> list[list[str]]:
    """Of each case the share within the bounds and tokens/s over those of the default mode, and their means."""
    labels = list(next(iter(judged["cases"].values())))
    cells = [
        [name, *(f"{row[label]['slo_share']:.0%}, {rate(row, label):.2f}x" for label in labels)]
        for name, row in judged["cases"].items()
    ]
    means = []
    for label in labels:
        share = mean({name: row[label]["slo_share"] for name, row in judged["cases"].items()})
        speed = math.exp(mean({name: math.log(rate(row, label)) for name, row in judged["cases"].items()}))
        means.append(f"{share:.0%}, {speed:.2f}x")
    return [["case", *labels], *cells, ["mean", *means]]


def rate(row: Mapping[str, Any], label: str) -> float:
    """Tokens a second over those of the default mode."""
    return float(row[label]["output_tok_s"] / row[str(DEFAULT)]["output_tok_s"])


def table(judged: Mapping[str, Any]) -> Table:
    """The judgement, to read."""
    head, *cells = rows(judged)
    made = Table(*head, title=heading(judged), title_justify="left")
    for row in cells:
        made.add_row(*row)
    return made


def page(judged: Mapping[str, Any], command: str) -> str:
    """The page in the documentation."""
    head, *cells = rows(judged)
    lines = [f"|{'|'.join(row)}|" for row in (head, ["---"] * len(head), *cells)]
    states = [f"|{key}|{mode}|" for key, mode in judged["table"].items()]
    chosen = ["|state|mode|", "|---|---|", *states, f"|{'any other' if states else 'any'}|{judged['default']}|"]
    curve = ["|tried|worth|", "|---|---|", *(f"|{what}|{worth:.3f}|" for what, worth in judged["curve"])]
    said = judged["validation"]
    last = f"\n{said[0].upper()}{said[1:]}.\n" if said else ""
    return f"""<!-- Made by `{command}`. -->
# Which modes keep a promise?

{heading(judged).capitalize()}.

Replays of SGLang {judged["sglang"]}, {judged["model"]} on {judged["profile"]}, {judged["attention"]}, promise
{judged["slo"]}. Share within the bounds, and tokens a second over `{DEFAULT}`, which is `feather` without a promise.

{chr(10).join(lines)}

## What is chosen

{chr(10).join(chosen)}

## How it was found

In training, mean log of the share within the bounds, less what is lost of throughput beyond 3%:

{chr(10).join(curve)}
{last}"""
