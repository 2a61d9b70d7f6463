"""Damaged and foreign input to whatever feather reads: it is read, or refused in one line, and neither takes long.

    python tests/faults/fuzz.py [--inputs 1000000] [--first 0] [--only NAME ...]

Inputs are made from good ones: bytes and JSON values are changed, dropped, doubled, moved and put in. Every reader gets
the same number, and what the inputs were is a matter of their number: a fault is found again with ``--first``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from feather_kernels.errors import PlanError
from feather_kernels.plan import make_plan
from feather_kernels.plans.batch_file import batch_text, load_batch, tree_batch
from feather_kernels.trees import tree_forest
from feather_sglang.adapter.options import VARIABLE, FeatherOptions, ReplayFlag, add_flags
from feather_sglang.errors import FeatherError
from feather_sglang.replay import trace_import
from feather_sglang.replay.formats import tokens
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.traces import load_trace, save_trace
from feather_sglang.scheduling.policies import PolicyState, load_policy, make_policy
from feather_sglang.slo import parse
from trace_samples import SAMPLES

LONGEST_LINE = 2000  # characters of a refusal
SHOWN = 10  # faults of a reader
MOST_SECONDS = 2.0  # for one input, of a machine that does something else beside
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e-320, 1e308,
    math.inf, math.nan, "", "x", "\x00", "\ud800", "é" * 300, "1", "on", "feather", "9" * 5000, [], {}, [[]], [0] * 50,
    {"a": {}}, {"": None},
)  # fmt: skip
PIECES = (
    b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r\n", b'"', b"\\", b"\\u0000", b"\\ud800", b"{", b"}", b"[", b"]",
    b",", b":", b"-", b"1e999", b"-1", b"NaN", b"Infinity", b"null", b"true", b"9" * 4400, b"[" * 3000, b'{"a":' * 3000,
    b"/*", b"=", b"x", b"\xf0\x9f\x98\x80",
)  # fmt: skip


def changed_value(rng: random.Random, document: Any) -> Any:
    """The JSON document with one of its values, or names, changed; it is changed in place."""
    holder: Any = {"": document}
    where: Any = ""
    while True:
        inner = holder[where]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
            break
        holder, where = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    act = rng.randrange(4)
    if where == "" or act == 0:
        holder[where] = rng.choice(VALUES)
    elif act == 1:
        del holder[where]
    elif isinstance(holder, list):
        holder.insert(where, rng.choice((*VALUES, holder[where])))
    else:
        holder[rng.choice(("", "x", "options", "seed", str(where) + " "))] = rng.choice((*VALUES, holder[where]))
    return holder[""] if where == "" else document


def changed_bytes(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    """The bytes with a piece changed, dropped, doubled, put in, or taken from another input."""
    begin = rng.randrange(len(content) + 1)
    end = min(len(content), begin + rng.choice((0, 1, 1, 2, 8, 100)))
    piece = rng.choice((
        rng.choice(PIECES), bytes([rng.randrange(256)]), content[begin:end] * 2, rng.choice(others)[begin:end],
    ))  # fmt: skip
    return content[:begin] + (piece if rng.random() < 0.9 else b"") + (content[end:] if rng.random() < 0.95 else b"")


def damaged(rng: random.Random, good: list[bytes]) -> bytes:
    """An input made from a good one; of lines of JSON one line's values are changed."""
    content = rng.choice(good)
    if rng.random() < 0.6:
        lines = content.split(b"\n") if content.count(b"\n{") else [content]
        number = rng.randrange(len(lines))
        with contextlib.suppress(ValueError):
            document = json.loads(lines[number])
            for _ in range(rng.choice((1, 1, 2, 3))):
                document = changed_value(rng, document)
            lines[number] = json.dumps(document).encode()
        content = b"\n".join(lines)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        content = changed_bytes(rng, content, good)
    return content


# Readers ----------------------------------------------------------------------------------------------------------


class Reader(NamedTuple):
    """A reader of input, which may raise ``FeatherError`` or ``PlanError``, with inputs that it accepts."""

    read: Callable[[bytes], None]
    good: list[bytes]


def of_file(folder: Path, name: str, read: Callable[[Path], None]) -> Callable[[bytes], None]:
    """A reader of files, given content."""
    path = folder / name

    def of_content(content: bytes) -> None:
        path.write_bytes(content)
        read(path)

    return of_content


def words_of(content: bytes) -> list[str]:
    return [word for word in content.decode(errors="surrogateescape").split("\n") if "\x00" not in word]


def read_flags(content: bytes) -> None:
    """As a replay's command line has them; what argparse itself refuses ends in a usage line and status 2."""
    parser = argparse.ArgumentParser(prog="fuzz")
    add_flags(parser, ReplayFlag)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words_of(content))
    except SystemExit as end:
        assert end.code in (0, 2), end.code


def read_order(content: bytes) -> None:
    """As the switch endpoint, and then each scheduler, does."""
    from feather_sglang.adapter.switch.switch import Order

    order = Order.from_json(content)
    assert Order.in_message(order.as_message()) == order or order != order or "nan" in repr(order).lower()
    FeatherOptions().updated(order.options)


def read_options(content: bytes) -> None:
    options = FeatherOptions.from_environment({VARIABLE: content.decode(errors="surrogateescape")})
    variables: dict[str, str] = {}
    options.to_environment(variables)
    assert FeatherOptions.from_environment(variables) == options


def read_trace(path: Path) -> None:
    trace = load_trace(path)
    copy = path.with_name("copy.jsonl")
    save_trace(trace, copy)
    again = load_trace(copy)  # with their numbers in the new file
    assert [one[1:5] for one in again.requests] == [one[1:5] for one in trace.requests]


class Words:
    """A tokenizer."""

    @staticmethod
    def encode(text: str, **more: object) -> list[int]:
        return [len(word) for word in text.split()]


def read_import(path: Path) -> None:
    parser = argparse.ArgumentParser()
    trace_import.add_arguments(parser)
    flags = ["--tokenizer", "words", "--rate", "5"] if path.read_bytes()[-1:] == b" " else ["--tokenizer", "words"]
    with mock.patch.object(tokens, "load_tokenizer", lambda name: Words):
        trace = trace_import.import_trace(parser.parse_args([str(path), "--out", "none", *flags])).trace
    copy = path.with_name("imported.jsonl")
    save_trace(trace, copy)
    load_trace(copy)


def read_policy(path: Path) -> None:
    policy = load_policy(path)
    for batch in range(4):
        policy.decide(PolicyState(batch, batch, 3))
        policy.observe(100.0)
    policy.save(path)
    load_policy(path)


def readers(folder: Path) -> dict[str, Reader]:
    """All of them."""
    turns = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": [1, %d]}'
    trace = "\n".join(turns % (1000 * i, 600 + i, i) for i in range(6)).encode()
    after = turns[:-1].replace("5", "9").encode() % (9000, 1500, 0)
    after = b"\n" + after.replace(b"[1, 0]", b"[1, 0, 3]") + b', "after": 0, "think": 7}'
    policies = []
    for name in ("heuristic", "bandit", "qlearning"):
        policy = make_policy(name, seed=3)
        for batch in range(300):
            policy.decide(PolicyState(batch % 40, batch % 7, batch % 5))
            if batch % 3 == 0:
                policy.observe(100.0 + batch % 11)
        policy.save(folder / "good.json")
        policies.append((folder / "good.json").read_bytes())
    plans = [make_plan(tree_forest(*shape), num_qo_heads=8, num_kv_heads=2, head_dim=64) for shape in
             (((1, 4, 16), (256, 32, 256)), ((2, 6), (100, 50)))]  # fmt: skip
    options = [
        b'{"max_wait": 30, "seed": 1}',
        b'{"max_overtaking": "inf", "explore": "off", "tbt": 50.5, "slo": "ttft=10x,tbt=5x"}',
        b'{"pace": "auto", "gather": true, "policy_file": null}',
    ]
    orders = [
        b'{"schedule_policy": "lpm"}',
        *(b'{"schedule_policy": "feather", "options": %s}' % one for one in options),
    ]
    options.append(b'{"pat_prefill": "auto", "record_plan": "/tmp", "pat_beside": "fa3", "allow_switch": true}')
    flags = [
        b"--feather-max-wait\n30\n--feather-explore\noff", b"--feather-slo=ttft=2,tbt=50\n--feather-tbt=3",
        b"--feather-max-overtaking=inf\n--feather-pace\nauto\n--feather-allow-switch",
        b"--feather-policy-file=%s\n--feather-row-order=true" % bytes(folder / "good.json"), b"--feather-pat-prefill",
    ]  # fmt: skip
    profile = Path(load_profile.__code__.co_filename).parent / "profiles"
    profiles = [path.read_bytes() for path in sorted(profile.glob("*.json"))]
    return {
        "trace": Reader(of_file(folder, "trace.jsonl", read_trace), [trace, trace + after, trace + b"\n"]),
        "import": Reader(
            of_file(folder, "import.txt", read_import), [content.encode() for content, *_ in SAMPLES.values()]
        ),
        "policy file": Reader(of_file(folder, "policy.json", read_policy), policies),
        "batch file": Reader(
            of_file(folder, "batch.json", lambda path: load_batch(path) and None),
            [batch_text(plan, plan.n_requests - 1).encode() for plan in plans],
        ),
        "flags": Reader(read_flags, flags),
        "switch order": Reader(read_order, orders),
        "options": Reader(read_options, options),
        "tree": Reader(
            lambda content: tree_batch(content.decode(errors="surrogateescape"), {}) and None,
            [b"1,4,16_32,25,32", b"2,6_100,50"],
        ),
        "bounds": Reader(
            lambda content: parse(content.decode(errors="surrogateescape")) and None,
            [b"ttft=2,tbt=50", b"ttft=10x,tbt=5x,tpot=30", b"mooncake"],
        ),
        "profile": Reader(of_file(folder, "profile.json", lambda path: load_profile(str(path)) and None), profiles),
    }


def give(name: str, reader: Reader, number: int) -> bool:
    """Give one input; whether it was refused. Raises ``AssertionError``, or what the reader should not have raised."""
    content = damaged(random.Random(f"{name} {number}"), reader.good)
    begun, refused = time.process_time(), False
    try:
        reader.read(content)
    except (FeatherError, PlanError) as error:
        refused = True
        assert "\n" not in str(error) and len(str(error)) <= LONGEST_LINE, f"no line: {str(error)[:3000]!r}"
    seconds = time.process_time() - begun
    assert seconds < MOST_SECONDS, f"{seconds:.1f} s"
    return refused


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first of each reader (%(default)s)")
    parser.add_argument("--only", nargs="*", help="these readers")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        known = readers(Path(folder))
        for reader in known.values():
            for content in reader.good:
                reader.read(content)  # it is good
        chosen = {name: known[name] for name in options.only or known}
        each, found = -(-options.inputs // len(chosen)), 0
        for name, reader in chosen.items():
            begun, faults = time.monotonic(), 0
            for number in range(options.first, options.first + each):
                try:
                    give(name, reader, number)
                except Exception as error:
                    faults += 1
                    if faults <= SHOWN:
                        print(f"{name} {number}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            found += faults
            print(f"{name}: {each} inputs, {faults} faults, {time.monotonic() - begun:.0f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{each * len(chosen)} inputs, {found or 'no'} faults, {peak} MB at most")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
