"""The tile shapes (m query rows, n KV tokens) that the kernels can be built with, and what bounds them on a GPU.

``python -m feather_kernels.tiles`` prints PAT's constraints for these tiles and their neighbours (`tile_solver`);
``--measure`` first measures the GPU's memory, ``--profile`` the selector's rule for n (`tile_selector`); both keep the
result in the GPU's profile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from feather_kernels.errors import BuildError

if TYPE_CHECKING:
    from feather_kernels.device import Device
    from feather_kernels.tile_selector import NRule
    from feather_kernels.tile_solver import Registers

# By ascending m, as they are built unless another n is asked for; csrc/packed_decode.cu has the same.
TILES = {
    "portable": ((8, 16), (16, 16), (32, 32), (64, 32)),
    "hopper": ((8, 16), (16, 16), (64, 64), (128, 64)),
}
WIDEST_HEAD = 128  # of m = 128: beyond, two warpgroups' results do not fit into registers


def built_tiles(path: str, head_dim: int) -> tuple[tuple[int, int], ...]:
    """The tiles of a path that are built for a head dimension."""
    return tuple(tile for tile in TILES[path] if tile[0] <= 64 or head_dim <= WIDEST_HEAD)


def n_choices(path: str, m: int, head_dim: int) -> tuple[int, ...]:
    """The n with which the tile of m rows can be built: a ring has at least two stages.

    Up to 16 rows are one warp's, which multiplies 16 tokens at a time. On the Hopper path a stage has 8 KB of K or
    more: what must be known of each has its place beside the rings, and there is room for 12 of them. None of more
    rows at a head dimension that the kernels do not have.
    """
    if m <= 16:
        return (16,)
    if path == "portable":
        least, ring = 16, {64: 192, 128: 96, 256: 64}.get(head_dim, 0) * m // 32
    else:
        least, ring = 4096 // head_dim, {64: 384, 128: 192, 256: 128}.get(head_dim, 0)
    return tuple(n for n in (16, 32, 64, 128) if least <= n <= ring // 2)


def chosen_tiles(path: str, head_dim: int, rules: Mapping[str, NRule]) -> tuple[tuple[int, int], ...]:
    """`built_tiles` with the n that a GPU's rule has for long KV, where it has a rule for these: it was timed once."""
    rule = rules.get(path) if head_dim == PROFILED_HEAD else None
    built = built_tiles(path, head_dim)
    return built if rule is None else tuple((m, rule.choose_n(m, LONGEST_KV)) for m, _ in built)


def are_tiles(path: str, head_dim: int, tiles: Sequence[tuple[int, int]]) -> bool:
    """Whether the path can be built with all of these."""
    rows = [m for m, _ in built_tiles(path, head_dim)]
    return all(m in rows and n in n_choices(path, m, head_dim) for m, n in tiles)


def parse_tile(text: str) -> tuple[str, int, int]:
    """(path, m, n) of "hopper:64x32"; for argparse."""
    path, _, shape = text.partition(":")
    m, _, n = shape.partition("x")
    if path not in TILES or not (m.isdecimal() and n.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: give {' or '.join(TILES)}, and m x n, such as hopper:64x32")
    return path, int(m), int(n)


CANDIDATES = tuple((m, n) for m in (8, 16, 32, 64, 128) for n in (16, 32, 64, 128, 256))
LONGEST_KV = 4096  # PAT 5.2: where the sweep behind the rule for n ends
PROFILED_HEAD, PROFILED_DTYPE = 128, "float16"  # what the rule in a GPU's profile was timed with
DTYPE_BYTES = {"float16": 2, "bfloat16": 2}


def table(device: Device, head_dim: int, dtype: str, registers: dict[str, Registers], stages: int) -> str:
    """The candidates of every path with what they need, as text."""
    from feather_kernels.tile_solver import Path, feasible_tiles, least_n, shared_bytes

    size = DTYPE_BYTES[dtype]
    lines = [f"{device.name}, head_dim {head_dim}, {dtype}, rings of {stages} stages; * is built, + on demand"]
    for name, built in TILES.items():
        if name == "hopper" and device.capability // 10 != 9:
            continue
        path = Path.of(name, head_dim)
        verdicts = feasible_tiles(device, head_dim, size, registers, CANDIDATES, name, stages)
        used = max((value.used for kernel, value in registers.items() if path.kernel in kernel), default=None)
        lines.append(f"\n{name}: {path.blocks} x {path.threads} threads an SM, {used or 'unknown'} registers a thread")
        lines.extend(next((verdict.reason.split("; ") for verdict in verdicts if verdict.ok), []))
        lines.append(f"{'m':>5} {'n':>4} {'teams/SM':>9} {'shared/block':>13} {'least n':>8}  feasible")
        for m, n, ok, reason in verdicts:
            on_demand = m in dict(built) and n in n_choices(name, m, head_dim)
            mark = "*" if (m, n) in built else "+" if on_demand else " "
            teams = path.teams_per_processor(m)
            shared = shared_bytes(path, m, n, head_dim, size, stages) if teams else "-"
            least = least_n(device, path, m, head_dim, size) if teams else None
            verdict = "yes" if ok else f"no ({reason})"
            lines.append(f"{mark}{m:>4} {n:>4} {teams or '-':>9} {shared:>13} {least or '-':>8}  {verdict}")
    return "\n".join(lines)


def profile_n(path: str, device: Device, head_dim: int, dtype: str) -> NRule:
    """The selector's rule for one path on this machine's GPU: every n that is feasible and can be built is timed.

    Prints a line for each KV length.
    """
    from feather_kernels.tile_selector import NRule, derive_pieces
    from feather_kernels.tile_solver import feasible_tiles
    from feather_kernels.tile_timing import UnitTimer

    timer = UnitTimer(path, head_dim, dtype)
    pieces = {}
    for m, built in built_tiles(path, head_dim):
        candidates = [(m, n) for n in n_choices(path, m, head_dim)]
        verdicts = feasible_tiles(device, head_dim, DTYPE_BYTES[dtype], {}, candidates, path)
        choices = [n for _, n, ok, _ in verdicts if ok] or [built]

        def time_of(n: int, kv_len: int, m: int = m) -> float:
            us = timer.time_us(m, n, kv_len)
            print(f"{path} m {m:>3} n {n:>3} KV {kv_len:>4}: {us:.1f} us", flush=True)
            return us

        step = min(choices)
        pieces[m] = derive_pieces(choices, time_of, range(step, LONGEST_KV + 1, step))
    return NRule(pieces)


def _registers(options: argparse.Namespace, device: Device) -> dict[str, Registers]:
    """The compiler's report: a given log, or that of the last build in the cache; empty if there is none."""
    from feather_kernels.build import ARCHITECTURES, cache_dir
    from feather_kernels.tile_solver import register_report

    target = ARCHITECTURES.get(device.capability)
    pattern = f"packed_decode_{options.dtype}_d{options.head_dim}_sm{target}-*.log"
    logs = [options.log] if options.log else sorted(cache_dir().glob(pattern), key=lambda log: log.stat().st_mtime)
    if not logs:
        return {}
    if not logs[-1].is_file():
        raise BuildError(
            f"no compiler's report {logs[-1]}: it lies beside each library that feather_kernels.build made"
        )
    print(f"registers: {logs[-1]}")
    return register_report(logs[-1].read_text())


def main(arguments: list[str] | None = None) -> int:
    """Print which tile shapes a GPU can run well, and what stops the others (PAT 5.2)."""
    from feather_kernels.device import Device

    parser = argparse.ArgumentParser(prog="python -m feather_kernels.tiles", description=main.__doc__)
    parser.add_argument("--device", help="a profile, such as h200, instead of this machine's GPU")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256))
    parser.add_argument("--dtype", default="float16", choices=sorted(DTYPE_BYTES))
    parser.add_argument(
        "--stages",
        type=int,
        default=2,
        help="of each ring, twice as many for m = 128 (default: %(default)s, the least)",
    )
    parser.add_argument("--log", type=Path, help="the compiler's report (default: of the last build in the cache)")
    parser.add_argument("--measure", action="store_true", help="measure memory latency and bandwidth on this GPU first")
    parser.add_argument("--profile", action="store_true", help="derive the rule for n on this GPU first")
    parser.add_argument("--out", type=Path, help="keep what was measured here (default: the GPU's profile)")
    options = parser.parse_args(arguments)
    try:
        if options.stages < 2:
            raise BuildError(f"--stages {options.stages}: a ring has at least 2")
        if options.profile and not options.out and (options.head_dim, options.dtype) != (PROFILED_HEAD, PROFILED_DTYPE):
            raise BuildError(
                f"a GPU's profile holds the rule of head_dim {PROFILED_HEAD}, {PROFILED_DTYPE}: name another file with "
                "--out"
            )
        if options.device and (options.measure or options.profile):
            raise BuildError("--measure and --profile are about this machine's GPU: leave out --device")
        device = Device.load(options.device) if options.device else Device.of()
        if options.measure:
            from feather_kernels.memory_probe import measure_bandwidth, measure_latency

            latency, times = measure_latency()
            for size, time in times.items():
                print(f"{size:>6} bytes: {time:.0f} ns")
            device = replace(device, latency_ns=round(latency, 1), bandwidth=round(measure_bandwidth(), 1))
            print(f"latency {device.latency_ns} ns, bandwidth {device.bandwidth} bytes/ns")
        if options.profile:
            paths = [path for path in TILES if path == "portable" or device.capability // 10 == 9]
            rules = {path: profile_n(path, device, options.head_dim, options.dtype) for path in paths}
            device = replace(device, n_rule=rules)
        if options.measure or options.profile:
            device.save(options.out or device.profile)
            print(f"kept in {options.out or device.profile}")
        print(table(device, options.head_dim, options.dtype, _registers(options, device), options.stages))
    except BuildError as error:
        print(f"feather_kernels.tiles: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
