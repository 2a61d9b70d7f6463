"""Models of every kind of layers on servers: the page of models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from perf_results import ResultError, get, load
from perf_servers import command_of, setup
from perf_text import Page, Section, caption, number, table

MODELS, TWO_RANKS = "models_h200.json", "data_parallel_h200.json"
FILES = (MODELS, "models_0517_h200.json", TWO_RANKS)  # the second has what was not measured again
ROOM = re.compile(  # flags that are no row's point
    r" *--(?:disable-custom-all-reduce"
    r"|(?:max-running-requests|max-total-tokens|cuda-graph-(?:max-)?bs-decode)(?: \d+)+)"
)
OURS = "pat"
FAR = 4  # times as much: worth a sentence
BATCHES = (  # `SHARED` and `PRIVATE` of check_models.py, with the numbers of its shapes
    "Each model decodes two steady batches, in which all requests run at once. In the one with a shared prefix, 64 "
    "requests are in 2 groups, each with a prefix of 3,000 tokens; in the one with nothing shared, each of 64 requests "
    "has a prompt of 800 tokens of its own. Qwen3-Next has 32 requests instead of 64; with DeepSeek V2-Lite, 256 "
    "requests share 5 prefixes of 5,000 tokens. Each request decodes 192 tokens, "
    "or 1,200 with Llama 3.2 1B, whose steps are so short that pauses of the host would show."
)
LAYERS = {  # of each kind of model in the support matrix that a GPU check has a shape of
    "dense": "full",
    "experts": "full",
    "windows": "windows, full",
    "sinks": "windows, full, sinks",
    "chunks": "chunks, full",
    "score scaling": "full, unlike score scales",
    "latent": "latent",
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
    """The results of ``check_models.py`` for one shape.

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
    between: str  # whose difference that is
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
        get(row, where, "spread", "largest"), row.get("between", ""),
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


def named(one: Model) -> str:
    """The model with its flags."""
    return f"{one.name}<br>`{one.flags}`" if one.flags else one.name


def cut_rows(found: Iterable[Model]) -> list[list[str]]:
    """What each model is, and whether pat is right on it."""
    return [
        [named(one), one.cut or "whole", LAYERS[one.kind], one.release, "**no**" if one.wrong else "yes"]
        for one in found
    ]


def answer_rows(found: Iterable[Model]) -> list[list[str]]:
    """How far each model's answers are from a stock backend's."""
    return [[named(one), f"{one.apart:.2f}", f"{one.spread:.2f}", one.between] for one in found]


def far_apart(found: Iterable[Model]) -> str:
    """A sentence on the models on which SGLang's own backends differ much more than pat differs from one of them."""
    names = [f"{one.name} ({one.between})" for one in found if one.spread > FAR * one.apart]
    return f" SGLang's own backends differ much more than `{OURS}` does on {', '.join(names)}." if names else ""


def rate_rows(found: Iterable[Model], prompts: str) -> list[list[str]]:
    """Each model's throughput with prompts that share a prefix, or with prompts that share nothing."""
    rates = ((one, getattr(one, prompts)) for one in found)
    return [
        [named(one), number(rate.ours), f"{number(rate.best)} ({rate.backend})", f"**{rate.ratio:.2f}**",
         f"{rate.noise:.0%}"]
        for one, rate in rates
    ]  # fmt: skip


def page(folder: Path) -> Page:
    """Whether pat is right on each model, and how fast beside the best of SGLang's own backends."""
    found = models(folder)
    where = "; ".join(dict.fromkeys(setup(folder, file) for file in FILES))
    rates = [
        "model", f"`{OURS}`, tokens/s", "fastest of SGLang's backends, tokens/s", f"`{OURS}` over it",
        "spread of repetitions",
    ]  # fmt: skip
    correct = Section(
        "Are the answers right?",
        [
            f"The tokens and log-probabilities of `{OURS}` are compared with those of one of SGLang's backends. The "
            "rounding of two backends differs, so the yardstick is how far a second backend of SGLang's is from that "
            f"one, and `{OURS}` counts as right within twice this distance. Where a model has one such backend only, "
            "the yardstick is the distance between its answers to all requests at once and to one request at a time. "
            "Weights are random. Large models are reduced, so that they fit and so that each token goes to all "
            "experts.",
            table(["model", "reduced to", "its layers", "SGLang", "right"], cut_rows(found)),
            caption(where),
            f"The largest difference of a log-probability, between `{OURS}` and SGLang's backend, and between the "
            "answers that are the yardstick." + far_apart(found),
            table(["model", f"`{OURS}` and SGLang's", "the yardstick", "which is between"], answer_rows(found)),
            caption(where),
        ],
        FILES,
        [command_of(folder, MODELS)],
    )
    fast = [
        Section(
            title,
            [
                "Output tokens/s of a steady batch, the median of repetitions. The spread of a backend is half of the "
                "range from its slowest repetition to its fastest, as a share of its median; the table has the largest "
                "spread of all backends of the row.",
                table(rates, rate_rows(found, prompts)),
                caption(where),
            ],
        )
        for title, prompts in (("With a shared prefix", "shared"), ("With nothing shared", "private"))
    ]
    return Page(
        "Which models were run, and how fast?",
        "Each model ran on servers that differ in the attention backend alone. Whether a model that is not here is "
        f"served is said in [which models and GPUs it works with](../start/models.md). {BATCHES}",
        [correct, *fast],
    )
