"""The command ``python -m feather_kernels.tune``: measurements, then PAT's constraints for tiles and neighbours."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from feather_kernels.build import ARCHITECTURES, cache_dir
from feather_kernels.device import Device, NRule
from feather_kernels.errors import BuildError
from feather_kernels.paths import KernelPath
from feather_kernels.tiles import (
    DTYPE_BYTES,
    LONGEST_KV,
    PROFILED_DTYPE,
    PROFILED_HEAD,
    TILES,
    built_tiles,
    n_choices,
)
from feather_kernels.tune.selector import derive_pieces
from feather_kernels.tune.solver import Registers, feasible_tiles, least_n, register_report, shared_bytes

CANDIDATES = tuple((m, n) for m in (8, 16, 32, 64, 128) for n in (16, 32, 64, 128, 256))


def table(device: Device, head_dim: int, dtype: str, registers: dict[str, Registers], stages: int) -> str:
    """The candidates of every path with what they need, as text."""
    size = DTYPE_BYTES[dtype]
    lines = [f"{device.name}, head_dim {head_dim}, {dtype}, rings of {stages} stages; * is built, + on demand"]
    for name in TILES:
        if name == "hopper" and device.path != "hopper":
            continue
        built = built_tiles(name, head_dim, device.shared_kb)
        path = KernelPath.of(name, head_dim, device.shared_kb)
        verdicts = feasible_tiles(device, head_dim, size, registers, CANDIDATES, name, stages)
        used = max((value.used for kernel, value in registers.items() if path.kernel in kernel), default=None)
        lines.append(f"\n{name}: {path.blocks} x {path.threads} threads an SM, {used or 'unknown'} registers a thread")
        lines.extend(next((verdict.reason.split("; ") for verdict in verdicts if verdict.ok), []))
        lines.append(f"{'m':>5} {'n':>4} {'teams/SM':>9} {'shared/block':>13} {'least n':>8}  feasible")
        for m, n, ok, reason in verdicts:
            on_demand = m in dict(built) and n in n_choices(name, m, head_dim, device.shared_kb)
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
    from feather_kernels.tune.timing import UnitTimer

    timer = UnitTimer(path, head_dim, dtype)
    pieces = {}
    for m, built in built_tiles(path, head_dim, device.shared_kb):
        candidates = [(m, n) for n in n_choices(path, m, head_dim, device.shared_kb)]
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
    parser = argparse.ArgumentParser(prog="python -m feather_kernels.tune", description=main.__doc__)
    parser.add_argument("--device", help="a profile, such as h200, instead of this machine's GPU")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256))
    parser.add_argument("--dtype", default="float16", choices=sorted(DTYPE_BYTES))
    parser.add_argument(
        "--stages",
        type=int,
        default=2,
        help="stages of each ring, twice as many for m = 128 (default: %(default)s, the least)",
    )
    parser.add_argument("--log", type=Path, help="the compiler's report (default: that of the last build)")
    parser.add_argument("--measure", action="store_true", help="measure memory latency and bandwidth on this GPU first")
    parser.add_argument("--profile", action="store_true", help="derive the rule for n on this GPU first")
    parser.add_argument("--out", type=Path, help="file for the measurements (default: the GPU's profile)")
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
            from feather_kernels.tune.memory_probe import measure_bandwidth, measure_latency

            latency, times = measure_latency()
            for size, time in times.items():
                print(f"{size:>6} bytes: {time:.0f} ns")
            device = replace(device, latency_ns=round(latency, 1), bandwidth=round(measure_bandwidth(), 1))
            print(f"latency {device.latency_ns} ns, bandwidth {device.bandwidth} bytes/ns")
        if options.profile:
            paths = [path for path in TILES if path in ("portable", device.path)]
            rules = {path: profile_n(path, device, options.head_dim, options.dtype) for path in paths}
            device = replace(device, n_rule=rules)
        if options.measure or options.profile:
            device.save(options.out or device.profile)
            print(f"kept in {options.out or device.profile}")
        print(table(device, options.head_dim, options.dtype, _registers(options, device), options.stages))
    except BuildError as error:
        print(f"feather_kernels.tune: error: {error}", file=sys.stderr)
        return 2
    return 0
