"""Models of every kind of layers on servers: a table of the performance page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from perf_results import ResultError, get, load
from perf_servers import command_of, setup
from perf_text import Section, number, table

MODELS, TWO_RANKS = "models_h200.json", "data_parallel_h200.json"
FILES = (MODELS, "models_0517_h200.json", TWO_RANKS)  # the second has what was not measured again
ROOM = re.compile(r" *--(?:max-running-requests \d+|disable-custom-all-reduce)")  # flags that are no row's point
OURS = "pat"
LAYERS = {  # of each kind of model in the support matrix that a GPU check has a shape of
    "dense": "full",
    "experts": "full",
    "windows": "windows, full",
    "sinks": "windows, full, sinks",
    "chunks": "chunks, full",
    "scores": "full, unlike scores",
    "linear": "linear, full",
}


class Rate(NamedTuple):
    """Tokens a second of pat and of the fastest of SGLang's own backends, on the same steady batch.

    `noise` is half the range of a backend's repetitions, the largest of all, as a share.
    """

    ours: float
    best: float
    backend: str
    noise: float

    @property
    def ratio(self) -> float:
        """To the best other; above 1 pat is faster."""
        return self.ours / self.best


class Model(NamedTuple):
    """What a file of ``check_models.py`` says of one shape.

    `wrong` is what its answers have against pat; `apart` the largest difference of a log-probability to the first stock
    backend's, `spread` the largest between two stock backends.
    """

    name: str
    release: str  # of SGLang
    kind: str
    cut: str
    flags: str
    wrong: list[str]
    apart: float
    spread: float
    shared: Rate
    private: Rate


def models(folder: Path) -> list[Model]:
    """Every shape, in the files' order."""
    found = []
    for file in FILES:
        content = load(folder, file)
        rows, release = get(content, file, "rows"), get(content, file, "machine", "versions", "sglang")
        if not rows:
            raise ResultError(f"{file}: rows is empty")
        found += [_model(row, release, file) for row in rows]
    return found


def _model(row: dict[str, Any], release: str, file: str) -> Model:
    name = get(row, file, "shape")
    where = f"{file}: {name}"
    kind = get(row, where, "kind")
    if kind not in LAYERS:
        raise ResultError(f"{where}: kind {kind} is not among {', '.join(LAYERS)}")
    return Model(
        name, release, kind, row.get("cut", ""), ROOM.sub("", row.get("flags", "")),
        get(row, where, "answers", "wrong"), get(row, where, "answers", "spread", "largest"),
        get(row, where, "spread", "largest"),
        *(_rate(get(row, where, "all_tok_s", which), f"{where}, {which}") for which in ("shared", "private")),
    )  # fmt: skip


def _rate(repeated: dict[str, Sequence[float]], where: str) -> Rate:
    # A client that is held up counts too many tokens a second, never too few: of two in the middle the lower counts.
    rates = {backend: median_low(times) for backend, times in repeated.items() if times}
    ours = get(rates, where, OURS)
    stock = {backend: rate for backend, rate in rates.items() if backend != OURS}
    if not stock:
        raise ResultError(f"{where}: no stock backend")
    best = max(stock, key=lambda backend: stock[backend])
    noise = max((max(repeated[backend]) - min(repeated[backend])) / 2 / rate for backend, rate in rates.items())
    return Rate(ours, stock[best], best, noise)


def answer_rows(found: Iterable[Model]) -> list[list[str]]:
    """What each model's answers are beside a stock backend's."""
    return [
        [one.name, one.cut or "nothing", f"`{one.flags}`" if one.flags else "none", one.release, LAYERS[one.kind],
         "**no**" if one.wrong else "yes", f"{one.apart:.2f}", f"{one.spread:.2f}"]
        for one in found
    ]  # fmt: skip


def rate_rows(found: Iterable[Model]) -> list[list[str]]:
    """Each model's throughput with prompts that share a prefix, and with prompts that share nothing."""
    return [
        [one.name, f"`{one.flags}`" if one.flags else "none", prompts, number(rate.ours), number(rate.best),
         rate.backend, f"**{rate.ratio:.2f}**", f"{rate.noise:.0%}"]
        for one in found
        for prompts, rate in (("shared prefix", one.shared), ("nothing shared", one.private))
    ]  # fmt: skip


def section(folder: Path) -> Section:
    """Whether pat is right on each model, and how fast beside the best of SGLang's own backends."""
    found = models(folder)
    answers = ["model", "left out of it", "flags", "SGLang", "layers", "right",
               "largest difference of a log-probability", "the same between stock answers"]  # fmt: skip
    rates = ["model", "flags", "prompts", f"`{OURS}`, tokens/s", "best stock backend, tokens/s", "which one",
             f"`{OURS}` to it", "spread"]  # fmt: skip
    body = [
        f"Each model runs on servers that differ in the attention backend alone. `{OURS}` is right where its tokens "
        "and log-probabilities are those of a stock backend, within twice what lies between two stock backends, or "
        "between one's answers at once and one by one:",
        table(answers, answer_rows(found)),
        "Throughput of steady batches, in output tokens/s, the median of repetitions; their spread is half of the "
        "range from the slowest to the fastest:",
        table(rates, rate_rows(found)),
    ]
    return Section("Other models", body, f"{setup(folder, MODELS)}.", [command_of(folder, MODELS)], list(FILES))
