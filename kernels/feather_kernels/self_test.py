"""The packed kernel on this machine's GPU, beside attention from the definition: one batch, or every variant.

``python -m feather_kernels.self_test --out FILE`` runs every variant and writes one JSON file: what the GPU is, how far
each result is from attention, and how long a run takes. It is what to send back from a GPU that nobody has run pat on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feather_kernels import prebuilt
from feather_kernels.build import DTYPES, HEAD_DIMS, Configuration, kernel_library
from feather_kernels.config import FP8
from feather_kernels.device import LIMITS, Device
from feather_kernels.errors import BuildError
from feather_kernels.forest import Forest
from feather_kernels.reference import direct_decode
from feather_kernels.reference_engine import to_numpy
from feather_kernels.trees import forest_table, tree_forest
from feather_kernels.wrapper import PackedDecodeWrapper

HEADS, KV_HEADS = 32, 8
PREFIX, TAILS = 700, (1, 40, 333, 64, 900, 5)
NODES, TOKENS = (1, 64), (2048, 128)  # of the tree that is timed: a prefix of 64 requests, and their tails
ALLOWED = {"float16": 0.004, "bfloat16": 0.02}  # results are sums of about 0.1, rounded to 11 or 8 bits
RUNS = 30


@dataclass(frozen=True)
class Variant:
    """A variant of the kernel: its types, head dimension and features."""

    dtype: str = "bfloat16"
    head_dim: int = 128
    soft_cap: bool = False
    sinks: bool = False
    fp8_kv: bool = False

    def configuration(self, device: Device) -> Configuration:
        """What its library for a GPU is built as, with the tiles that it has by default."""
        return Configuration(
            self.dtype, self.head_dim, device.capability, self.soft_cap, (), self.sinks, self.fp8_kv,
            shared_kb=device.limited_kb,
        )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The result of one variant; ``failure`` is empty if it computed attention.

    Attributes
    ----------
    path : str
        The kernels' path.
    shared_nodes : int
        Of the batch that is compared.
    error, allowed : float
        The largest difference of a value.
    us : float
        Median time of a run on 64 requests that share 2,048 tokens, launch included.
    seconds : float
        To load it, which compiles it where it was not built ahead.
    """

    variant: Variant
    path: str = ""
    shared_nodes: int = 0
    error: float | None = None
    allowed: float = 0.0
    us: float | None = None
    seconds: float = 0.0
    failure: str = ""


def self_test() -> str:
    """Decode requests in two prefix groups in bfloat16; what came out, in words.

    Raises ``BuildError`` where the kernel cannot be built or loaded, or computes something else.
    """
    start = time.perf_counter()
    verdict = compare(Variant())
    if verdict.failure:
        raise BuildError(f"{verdict.failure}: report this GPU")
    tested = time.perf_counter() - start - verdict.seconds
    return (
        f"can serve here ({verdict.path} path, {verdict.shared_nodes} shared nodes, largest error {verdict.error:.1e}; "
        f"loaded in {verdict.seconds:.1f} s, tested in {tested:.1f} s)"
    )


def compare(variant: Variant, path: str = "auto") -> Verdict:
    """One variant's result beside attention from the definition."""
    start = time.perf_counter()
    decode = _wrapper(variant, path, len(TAILS))
    loaded = time.perf_counter() - start
    lens = [PREFIX + tail for tail in TAILS]
    generator = torch.Generator("cuda").manual_seed(0)
    slots = torch.randperm(2 * PREFIX + sum(TAILS), generator=generator, device="cuda").to(torch.int32)
    table = torch.zeros(len(lens), max(lens), dtype=torch.int32, device="cuda")
    used = 2 * PREFIX
    for row, tail in enumerate(TAILS):
        group = row % 2
        table[row, :PREFIX] = slots[group * PREFIX : (group + 1) * PREFIX]
        table[row, PREFIX : PREFIX + tail] = slots[used : used + tail]
        used += tail
    q, k, v, scores = _inputs(variant, len(lens), len(slots), generator)
    forest = Forest.from_block_table(to_numpy(table), lens, page_size=1)
    decode.plan(forest, table)
    out = decode.run(q, k, v, **scores)
    assert isinstance(out, torch.Tensor)
    sinks = scores["sinks"]
    exact, _ = direct_decode(
        forest, to_numpy(q), to_numpy(k.float()), to_numpy(v.float()), to_numpy(table).ravel(), 1,
        logit_soft_cap=scores["logit_soft_cap"], sinks=None if sinks is None else to_numpy(sinks),
    )  # fmt: skip
    error, allowed = float(np.abs(to_numpy(out) - exact).max()), ALLOWED[variant.dtype]
    wrong = "" if error < allowed else f"the packed kernel's result is {error:.3g} away from attention"
    nodes = forest.n_nodes
    return Verdict(variant, decode.config.path, nodes, error, allowed, seconds=loaded, failure=wrong)


def timed(variant: Variant, path: str = "auto") -> float:
    """Median time of a run in microseconds, on a tree of 64 requests."""
    decode = _wrapper(variant, path, NODES[-1])
    forest = tree_forest(NODES, TOKENS)
    table, slots = forest_table(forest)
    q, k, v, scores = _inputs(variant, NODES[-1], slots, torch.Generator("cuda").manual_seed(1))
    decode.plan(forest, torch.from_numpy(table).cuda())
    out = torch.empty_like(q)
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        decode.run(q, k, v, out=out, **scores)
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def _wrapper(variant: Variant, path: str, requests: int) -> PackedDecodeWrapper:
    return PackedDecodeWrapper(
        HEADS, KV_HEADS, variant.head_dim, max_requests=requests, dtype=getattr(torch, variant.dtype), path=path,
        kv_dtype=FP8 if variant.fp8_kv else None, logit_soft_cap=30.0 * variant.soft_cap, sinks=variant.sinks,
    )  # fmt: skip


def _inputs(variant: Variant, requests: int, slots: int, generator: torch.Generator) -> tuple[Any, Any, Any, dict]:
    """Random queries and caches, and the other arguments of a run."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(getattr(torch, variant.dtype))

    q, k, v = random(requests, HEADS, variant.head_dim), *(random(slots, KV_HEADS, variant.head_dim) for _ in range(2))
    if variant.fp8_kv:
        k, v = k.to(FP8), v.to(FP8)
    sinks = random(HEADS) if variant.sinks else None
    return q, k, v, {"logit_soft_cap": 30.0 * variant.soft_cap, "sinks": sinks}


def variants(every: bool) -> list[Variant]:
    """Each type and head dimension plain and with one feature; with ``every``, with each set of features."""
    both = (False, True)
    found = [Variant(*choice) for choice in itertools.product(sorted(DTYPES), HEAD_DIMS, both, both, both)]
    return [one for one in found if every or one.soft_cap + one.sinks + one.fp8_kv <= 1]


def check_all(asked: list[Variant], path: str, jobs: int) -> Iterator[Verdict]:
    """Compare and time each variant; ends with the one after which CUDA answers nothing any more."""
    device = Device.of()
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        ready = [pool.submit(kernel_library, variant.configuration(device)) for variant in asked]
        for variant, library in zip(asked, ready, strict=True):
            try:
                library.result()
                verdict = compare(variant, path)
                yield replace(verdict, us=timed(variant, path))
            except (BuildError, ValueError) as error:
                yield Verdict(variant, failure=str(error))
            except RuntimeError as error:  # of CUDA
                yield Verdict(variant, failure=str(error).partition("\n")[0])
                try:
                    torch.cuda.synchronize()
                except RuntimeError:
                    pool.shutdown(cancel_futures=True)
                    return


def report(verdicts: list[Verdict], asked: int) -> dict[str, Any]:
    """The file's content."""
    device = Device.of()
    real = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "format": 1, "when": time.strftime("%Y-%m-%d %H:%M:%S"), "device": asdict(replace(device, n_rule={})),
        "limits": os.environ.get(LIMITS, ""), "memory_bytes": real.total_memory, "torch": torch.__version__,
        "cuda": torch.version.cuda, "prebuilt": prebuilt.describe(), "asked": asked,
        "right": sum(not verdict.failure for verdict in verdicts), "variants": [asdict(one) for one in verdicts],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run every variant of the kernels on this machine's GPU and write one file to send back."""
    parser = argparse.ArgumentParser(prog="python -m feather_kernels.self_test", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON file goes")
    parser.add_argument(
        "--all", action="store_true", help="each set of features too, beside each feature: twice as many"
    )
    parser.add_argument("--path", choices=("auto", "portable"), default="auto", help="of the kernels, on a Hopper GPU")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="kernels to compile at the same time")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "feather_kernels.self_test: error: torch sees no NVIDIA GPU: run this where there is one", file=sys.stderr
        )
        return 2
    asked, verdicts = variants(options.all), []
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for verdict in check_all(asked, options.path, options.jobs):
            verdicts.append(verdict)
            said = (
                verdict.failure
                or f"{verdict.path}, error {verdict.error:.1e} of {verdict.allowed}, {verdict.us:.0f} us"
            )
            features = [name for name in ("soft_cap", "sinks", "fp8_kv") if getattr(verdict.variant, name)]
            print(f"{verdict.variant.dtype} {verdict.variant.head_dim} {' '.join(features)}: {said}", flush=True)
        content = report(verdicts, len(asked))
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    except (BuildError, OSError) as error:
        print(f"feather_kernels.self_test: error: {error}", file=sys.stderr)
        return 2
    print(f"{content['right']} of {len(asked)} right; {options.out} is the file to send back")
    return 0 if content["right"] == len(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
