"""``feather trace import``: a trace of what people have, and a line each on what the file lacks and how it is made up.

A file without prefixes gives prompts that share none, or the prefixes that were asked for; one without times gives a
Poisson process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from feather_sglang.errors import FeatherError
from feather_sglang.replay.compression import bare
from feather_sglang.replay.formats.found import Format, Found, Source
from feather_sglang.replay.formats.registry import FORMATS, format_of
from feather_sglang.replay.formats.tokens import BlockIds, Tokenizer
from feather_sglang.replay.given import check_positive
from feather_sglang.replay.traces import LONGEST, Trace, TraceRequest, fitting, ordered
from feather_sglang.replay.workloads import check_within, generator, poisson

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
LATEST = 1e10  # seconds of a time, from whatever it is counted
MADE_BLOCK = 64  # tokens in a block that is named here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says where from, where to, and what to make up."""
    parser.add_argument("file", type=Path, help="file to read, also packed as .gz or .zst")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="trace to write, packed as its name says"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file named by --out")
    parser.add_argument("--format", choices=("auto", *FORMATS), default="auto", help="format of the file (%(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--time-unit", choices=tuple(UNITS), help="unit of the file's times (as its format has it)")
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help=f"tokens per hash id of the file (as its format has it), or to make of text ({MADE_BLOCK})",
    )
    parser.add_argument("--rate", type=float, metavar="X", help="requests a second, for a file without times")
    parser.add_argument(
        "--shared-prefix",
        type=_prefixes,
        metavar="GROUPSxTOKENS",
        help="prefixes for a file that says nothing of them: 5x2000 opens each prompt with one of 5 of 2,000 tokens",
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="name or folder of the model whose tokenizer reads texts")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is made up (%(default)s)")


def _prefixes(text: str) -> tuple[int, int]:
    groups, _, tokens = text.partition("x")
    try:
        return int(groups), int(tokens)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected groups and tokens, as in 5x2000") from None


@dataclass(frozen=True)
class Imported:
    """A trace, the format it came in, and in a line each what was made up for it."""

    trace: Trace
    format: str
    made_up: list[str]


def import_trace(args: argparse.Namespace) -> Imported:
    """Read the file that the arguments name."""
    check_positive(args, "requests", "block_size")
    form = format_of(args.file) if args.format == "auto" else FORMATS[args.format]
    tokenizer = Tokenizer(args.tokenizer) if args.tokenizer else None
    source = Source(args.file, tokenizer, BlockIds(args.block_size or MADE_BLOCK))
    found, empty = [], 0
    for one in form.read(source):
        if one.input_length and one.output_length:
            check_within(f"{one.where}: length", max(one.input_length, one.output_length), 1, LONGEST)
            found.append(one)
            if len(found) == args.requests:
                break
        else:
            empty += 1
    if not found:
        raise FeatherError(f"{args.file}: has no request with a prompt and an answer")
    if empty:
        source.notices.append(f"{args.file}: {empty:,} requests without a prompt or an answer are left out")
    made_up: list[str] = []
    times = _times(args, form, source, found, made_up)
    block_size, paths = _paths(args, form, found, made_up)
    requests = [TraceRequest(i, times[i], one.input_length, one.output_length, paths[i]) for i, one in enumerate(found)]
    trace = ordered(bare(args.file).stem, block_size, requests, f"{args.file}", source.notices)
    return Imported(trace, form.name, made_up)


def _times(
    args: argparse.Namespace, form: Format, source: Source, found: Sequence[Found], made_up: list[str]
) -> list[float]:
    """Seconds at which the requests came."""
    unit = UNITS.get(args.time_unit, form.unit)
    times = [one.time * unit for one in found if one.time is not None]
    if times and not max(map(abs, times)) <= LATEST:
        raise FeatherError(f"{args.file}: has times beyond {LATEST:g} s")
    if len(times) == len(found):
        if args.rate is not None:
            raise FeatherError("--rate is for a file without times; change the rate of a trace by --rate-scale of ab")
        return times
    if times:
        missing = next(one for one in found if one.time is None)
        raise FeatherError(f"{missing.where}: has no time, as other requests have")
    rate = args.rate if args.rate is not None else source.rate
    if rate is None:
        raise FeatherError(f"{args.file}: has no times: give --rate, in requests a second")
    made_up.append(
        f"times: the file has none; made up as a Poisson process of {rate:,.4g} requests a second"
        + ("" if args.rate is not None else ", its own rate (--rate gives another)")
    )
    return poisson(generator(args.seed), rate, len(found))


def _paths(
    args: argparse.Namespace, form: Format, found: Sequence[Found], made_up: list[str]
) -> tuple[int, list[tuple[int, ...]]]:
    """Tokens in a block, and the ids of each prompt's blocks."""
    fresh = count(1 + max((max(one.hash_ids, default=0) for one in found if one.hash_ids), default=-1))
    if all(one.hash_ids is None for one in found):
        return _made_paths(args, found, fresh, made_up)
    if args.shared_prefix:
        raise FeatherError("--shared-prefix is for a file that says nothing of prefixes; this one names blocks")
    size = args.block_size or form.block_size or MADE_BLOCK
    paths, lacking = [], 0
    for one in found:
        ids, blocks = one.hash_ids, -(-one.input_length // size)
        if ids is None:
            lacking += 1
            ids = tuple(islice(fresh, blocks))
        elif len(ids) == blocks - 1 and one.input_length % size:
            ids = (*ids, next(fresh))  # some name only the blocks that are full
        elif len(ids) != blocks:
            raise FeatherError(
                f"{one.where}: hash_ids: {len(ids)} ids, but {one.input_length} tokens have {blocks} blocks of {size}"
                f"{fitting(one.input_length, len(ids))}"
            )
        paths.append(ids)
    if lacking:
        made_up.append(f"prefixes: the file has {lacking:,} prompts not as a whole; these share none")
    return size, paths


def _made_paths(
    args: argparse.Namespace, found: Sequence[Found], fresh: count[int], made_up: list[str]
) -> tuple[int, list[tuple[int, ...]]]:
    if args.shared_prefix is None:
        made_up.append("prefixes: the file says nothing of them; no prompt shares any (--shared-prefix makes some up)")
        return max(one.input_length for one in found), [(next(fresh),) for _ in found]
    groups, size = args.shared_prefix
    check_within("--shared-prefix: groups", groups, 1)
    check_within("--shared-prefix: tokens", size, 1, LONGEST // 4)
    made_up.append(
        f"prefixes: the file says nothing of them; each prompt opens with one of {groups:,} made-up ones of {size:,} "
        "tokens, or is a part of it"
    )
    prefixes = list(islice(fresh, groups))
    chosen = generator(args.seed).integers(groups, size=len(found))
    return size, [
        (prefixes[group], *islice(fresh, -(-one.input_length // size) - 1))
        for group, one in zip(chosen, found, strict=True)
    ]
