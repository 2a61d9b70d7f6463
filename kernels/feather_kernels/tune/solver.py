"""The tile solver: which (m, n) a GPU can run well, from its own numbers (PAT 5.2, constraints 1 to 3).

PAT's constraints are about a thread block with one Q tile and one KV tile. Here a block holds several *teams* (the
warps that share a KV tile), each with a ring of KV stages, and a team's queries and results stay in registers. So
shared memory is counted per block over its teams, and the concurrency C of constraint 2 is the tiles that are copied at
the same time per multiprocessor: one a team, or two where two pairs of warps copy into one ring.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from feather_kernels.device import Device
from feather_kernels.paths import KernelPath

RESERVED = 1024  # bytes of shared memory that the driver takes of every block
STAGES = 2  # of a ring, at least: one is read while the next one arrives
REGISTER_UNIT = 8  # registers are given out in eights


class Registers(NamedTuple):
    """The compiler's report on a kernel: registers of a thread, and spilled bytes."""

    used: int
    spilled: int


class Verdict(NamedTuple):
    """Whether a tile fits one path of a GPU, and what limits it."""

    m: int
    n: int
    ok: bool
    reason: str  # the constraint that fails, or what could not be checked


def register_report(log: str) -> dict[str, Registers]:
    """Registers and spilled bytes by (mangled) kernel name, from what ``nvcc -Xptxas=-v`` prints.

    ``feather_kernels.build`` keeps it beside each library, as a ``.log``.
    """
    report: dict[str, Registers] = {}
    name, spilled = "", 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '([^']+)'", line):
            name, spilled = entry[1], 0
        elif stores := re.search(r"(\d+) bytes spill stores", line):
            spilled = int(stores[1])
        elif (used := re.search(r"Used (\d+) registers", line)) and name:
            report[name] = Registers(int(used[1]), spilled)
            name = ""
    return report


def shared_bytes(path: KernelPath, m: int, n: int, head_dim: int, element_bytes: int, stages: int = STAGES) -> int:
    """Shared memory of a block's rings, of `stages` tiles of K and of V; m = 128: twice (constraint 1, left side).

    PAT adds m * h * b for the queries and m * h * 4 for the results; these kernels keep both in registers.
    """
    return path.copies(m) * stages * 2 * n * head_dim * element_bytes


def least_n(device: Device, path: KernelPath, m: int, head_dim: int, element_bytes: int) -> int | None:
    """Constraint 2: ceil(L * B / (S * C * h * b)), so that the tiles in flight cover the memory's latency.

    Counts tiles of K or V that are copied at the same time, as PAT does; a ring's further stages come on top. None if L
    or B is not measured.
    """
    if device.latency_ns is None or device.bandwidth is None:
        return None
    copies = path.blocks * path.copies(m)
    return -int(-device.latency_ns * device.bandwidth // (device.n_sm * copies * head_dim * element_bytes))


def feasible_tiles(
    device: Device,
    head_dim: int,
    element_bytes: int,
    register_report: Mapping[str, Registers],
    candidates: Iterable[tuple[int, int]],
    path: str = "portable",
    stages: int = STAGES,
) -> list[Verdict]:
    """Check tile shapes against PAT's constraints.

    Parameters
    ----------
    device : Device
    head_dim, element_bytes : int
        Of K and V.
    register_report : mapping
        Of `register_report`; without an entry for the path's kernel, registers are not checked.
    candidates : iterable of (m, n)
    path : {"portable", "hopper"}
    stages : int
        Of each ring; for m = 128 half of them.

    Returns
    -------
    list of (m, n, ok, reason)
        ``reason`` names the first constraint that fails; for a feasible tile, what could not be checked.
    """
    how = KernelPath.of(path, head_dim, device.shared_kb)
    found = [registers for name, registers in register_report.items() if how.kernel in name]
    registers = max(found) if found else None
    verdicts = []
    for m, n in candidates:
        reason = (
            _shape_fails(how, m, n)
            or _shared_fails(device, how, m, n, head_dim, element_bytes, stages)
            or _registers_fail(device, how, registers)
            or _bandwidth_fails(device, how, m, n, head_dim, element_bytes)
        )
        notes = [] if registers else ["registers not checked: build the kernel first"]
        if registers and registers.spilled:
            notes.append(f"the compiler spills {registers.spilled} bytes")
        if device.latency_ns is None or device.bandwidth is None:
            notes.append("constraint 2 not checked until latency and bandwidth are measured")
        verdicts.append(Verdict(m, n, not reason, reason or "; ".join(notes)))
    return verdicts


def _shape_fails(path: KernelPath, m: int, n: int) -> str:
    """Constraint 3; with the operands swapped, queries are columns, of which mma.sync takes eight."""
    if n < 16 or n & (n - 1):
        return f"3: n = {n} is no power of two from 16 on"
    if m < 8 or m & (m - 1):
        return f"3: m = {m} is no power of two from 8 on"
    if m <= 16 and n > 16:
        return f"3: n = {n}, a single warp's step is 16 tokens"
    if path.uses_wgmma(m) and m not in (64, 128):
        return f"3: m = {m}, wgmma has 64 rows, two warpgroups share KV at most, and a single warp has 16"
    if path.teams(m) == 0:
        return f"3: m = {m} needs {path.team_warps(m)} warps, a block has {path.warps}"
    return ""


def _shared_fails(
    device: Device, path: KernelPath, m: int, n: int, head_dim: int, element_bytes: int, stages: int
) -> str:
    size = shared_bytes(path, m, n, head_dim, element_bytes, stages)
    if size > device.shared_per_block:
        return f"1: {size} bytes of shared memory, a block has {device.shared_per_block}"
    if path.blocks * (size + RESERVED) > device.shared_per_sm:
        return f"1: {path.blocks} blocks of {size} bytes of shared memory, an SM has {device.shared_per_sm}"
    return ""


def _registers_fail(device: Device, path: KernelPath, registers: Registers | None) -> str:
    if registers is None:
        return ""
    if registers.used > device.registers_per_thread:
        return f"1: {registers.used} registers a thread, at most {device.registers_per_thread}"
    total = path.blocks * path.threads * (-(-registers.used // REGISTER_UNIT) * REGISTER_UNIT)
    if total > device.registers_per_sm:
        return f"1: {path.blocks} blocks use {total} registers, an SM has {device.registers_per_sm}"
    return ""


def _bandwidth_fails(device: Device, path: KernelPath, m: int, n: int, head_dim: int, element_bytes: int) -> str:
    least = least_n(device, path, m, head_dim, element_bytes)
    return f"2: n = {n}, the memory's latency needs {least}" if least is not None and n < least else ""
