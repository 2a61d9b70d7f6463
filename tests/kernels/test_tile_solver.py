"""PAT's constraints on tile shapes, against numbers worked out by hand; and the compiler's report that they need."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from feather_kernels import tiles
from feather_kernels.build import Configuration, compiled_kernel, source_dir
from feather_kernels.device import PROFILES, Device
from feather_kernels.errors import BuildError
from feather_kernels.options import tail_warps_of
from feather_kernels.paths import SHARED_KB, KernelPath, portable_ring
from feather_kernels.tune import cli
from feather_kernels.tune.solver import RESERVED, Registers, feasible_tiles, least_n, register_report, shared_bytes

LOG = Path(__file__).parents[1] / "data" / "packed_decode_sm90a.log"
H200 = Device.load("h200")
SOURCE = (source_dir() / "traits.h").read_text()


def verdict(tile, path="portable", device=H200, head_dim=128, report=None, stages=2):
    report = register_report(LOG.read_text()) if report is None else report
    ((_, _, ok, reason),) = feasible_tiles(device, head_dim, 2, report, [tile], path, stages)
    return ok, reason


def test_the_compilers_report():
    report = register_report(LOG.read_text())
    assert sorted(report.values()) == [Registers(52, 0), Registers(168, 76), Registers(255, 0)]
    assert [used for name, used in report.items() if "HopperForward" in name] == [Registers(168, 76)]
    assert register_report("ptxas info    : Used 9 registers\n") == {}


def test_shared_memory_by_hand():
    portable, hopper = KernelPath.of("portable", 128), KernelPath.of("hopper", 128)
    # four single warps a block, two stages of K and V, 16 rows of 128 elements of 2 bytes
    assert shared_bytes(portable, 16, 16, 128, 2) == 4 * 2 * 2 * 16 * 128 * 2 == 65536
    assert shared_bytes(portable, 64, 32, 128, 2) == 1 * 2 * 2 * 32 * 128 * 2
    # two warpgroups, three stages, rows without padding
    assert shared_bytes(hopper, 64, 64, 128, 2, stages=3) == 2 * 3 * 2 * 64 * 128 * 2 == 196608
    assert shared_bytes(hopper, 8, 16, 128, 2) == 12 * 2 * 2 * 16 * 128 * 2  # the copying warps have rings too
    assert shared_bytes(KernelPath.of("hopper", 256), 64, 64, 256, 2) == 1 * 2 * 2 * 64 * 256 * 2
    # two warpgroups share one ring, which has the stages of both
    assert hopper.teams(64) == 2 and hopper.teams(128) == 1
    assert shared_bytes(hopper, 128, 64, 128, 2, stages=3) == 6 * 2 * 64 * 128 * 2 == 196608


def test_constraint_1_shared_memory():
    assert verdict((64, 64), "hopper", stages=3)[0]
    assert verdict((64, 64), "hopper", stages=4) == (False, "1: 262144 bytes of shared memory, a block has 232448")
    assert verdict((128, 64), "hopper", stages=3)[0]
    assert verdict((128, 64), "hopper", stages=4) == (False, "1: 262144 bytes of shared memory, a block has 232448")
    # two blocks of 131072 bytes, and 1 KB that the driver takes of each
    assert verdict((64, 128)) == (False, "1: 2 blocks of 131072 bytes of shared memory, an SM has 233472")
    exact = replace(H200, shared_per_sm=2 * (131072 + 1024))
    assert verdict((64, 128), device=exact)[0]
    assert not verdict((64, 128), device=replace(exact, shared_per_sm=exact.shared_per_sm - 1))[0]


def test_constraint_1_registers():
    # 2 blocks of 128 threads, and registers are given out in eights
    assert verdict((16, 16), report={"PortableForward": Registers(255, 0)})[0]  # 2 * 128 * 256 == 65536
    assert verdict((16, 16), report={"PortableForward": Registers(256, 0)})[1].startswith("1: 256 registers a thread")
    # 384 threads: 170 registers count as 176, and 384 * 176 = 67584
    assert verdict((64, 64), "hopper", report={"HopperForward": Registers(168, 0)})[0]
    assert verdict((64, 64), "hopper", report={"HopperForward": Registers(170, 0)}) == (
        False,
        "1: 1 blocks use 67584 registers, an SM has 65536",
    )


def test_constraint_2_covers_the_latency():
    device = replace(H200, latency_ns=800.0, bandwidth=4300.0)
    hopper, portable = KernelPath.of("hopper", 128), KernelPath.of("portable", 128)
    # 800 ns * 4300 bytes/ns = 3.44 MB in flight; 132 SMs * 2 teams * 256 bytes a row = 67584: 50.9 rows
    assert least_n(device, hopper, 64, 128, 2) == 51
    assert least_n(device, hopper, 128, 128, 2) == 51  # one team, but four warps copy for it
    assert least_n(device, portable, 16, 128, 2) == 13  # 8 teams an SM: 12.7
    assert least_n(replace(device, latency_ns=67584.0, bandwidth=64.0), hopper, 64, 128, 2) == 64  # no rounding up
    assert verdict((64, 32), "hopper", device) == (False, "2: n = 32, the memory's latency needs 51")
    assert verdict((64, 64), "hopper", device)[0]


def test_constraint_2_is_not_checked_without_a_latency():
    assert least_n(replace(H200, latency_ns=None), KernelPath.of("hopper", 128), 64, 128, 2) is None
    ok, reason = verdict((64, 16), "hopper", replace(H200, latency_ns=None))
    assert ok and "constraint 2 not checked" in reason


@pytest.mark.parametrize(
    "tile, path, begin",
    [
        ((16, 8), "portable", "3: n = 8 is no power of two from 16 on"),
        ((16, 48), "portable", "3: n = 48"),
        ((4, 16), "portable", "3: m = 4 is no power of two from 8 on"),
        ((24, 16), "portable", "3: m = 24"),
        ((128, 16), "portable", "3: m = 128 needs 8 warps, a block has 4"),
        ((32, 16), "hopper", "3: m = 32, wgmma has 64 rows"),
        ((256, 64), "hopper", "3: m = 256, wgmma has 64 rows, two warpgroups"),
    ],
)
def test_constraint_3(tile, path, begin):
    ok, reason = verdict(tile, path)
    assert not ok and reason.startswith(begin)


def test_two_warpgroups_need_two_in_a_block():
    assert verdict((128, 64), "hopper", head_dim=256) == (False, "3: m = 128 needs 8 warps, a block has 4")


def test_unknown_registers_and_spills_are_said():
    assert "registers not checked" in verdict((16, 16), report={})[1]
    assert "spills 76 bytes" in verdict((64, 64), "hopper")[1]


@pytest.mark.parametrize(
    "path, head_dim", [*(("portable", dim) for dim in (64, 128, 256)), ("hopper", 64), ("hopper", 128)]
)
def test_every_tile_that_is_built_is_feasible_on_an_h200(path, head_dim):
    verdicts = feasible_tiles(replace(H200, latency_ns=None), head_dim, 2, {}, tiles.TILES[path], path)
    assert [(v.m, v.n, v.reason) for v in verdicts if not v.ok] == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("path", sorted(tiles.TILES))
def test_every_tile_that_is_feasible_on_an_h200_can_be_built(path, head_dim):
    verdicts = feasible_tiles(H200, head_dim, 2, {}, cli.CANDIDATES, path)
    can = {(m, n) for m, _ in tiles.built_tiles(path, head_dim) for n in tiles.n_choices(path, m, head_dim)}
    assert {(v.m, v.n) for v in verdicts if v.ok} <= can
    assert set(tiles.built_tiles(path, head_dim)) <= can


def test_a_tiles_n_by_hand():
    """Two stages fit into a ring: of 192 tokens at head_dim 128 on the Hopper path, of 96 for 64 rows elsewhere."""
    assert tiles.n_choices("hopper", 64, 128) == tiles.n_choices("hopper", 128, 128) == (32, 64)
    assert tiles.n_choices("hopper", 64, 64) == tiles.n_choices("hopper", 128, 64) == (64, 128)
    assert tiles.n_choices("hopper", 64, 256) == (16, 32, 64)
    assert tiles.n_choices("portable", 32, 128) == (16, 32) and tiles.n_choices("portable", 64, 256) == (16, 32, 64)
    assert tiles.n_choices("hopper", 16, 64) == tiles.n_choices("portable", 8, 128) == (16,)


@pytest.mark.parametrize("head_dim, ring", [(64, 384), (128, 192), (256, 128)])
def test_every_ring_of_the_hopper_path_has_its_barriers(head_dim, ring):
    """What csrc/sm90/kv_pipeline.cuh asserts: more places for known units than the ring has stages, and one."""
    assert f"kHeadDim == {head_dim} ? {ring}" in SOURCE or f": {ring};" in SOURCE
    for m, _ in tiles.built_tiles("hopper", head_dim):
        for n in tiles.n_choices("hopper", m, head_dim) if m > 16 else ():
            stages = ring * m // 64 // n
            assert 2 <= stages <= 12 and (8 if stages < 7 else 16) > stages + 1


def test_a_single_warps_step_is_16_tokens():
    assert verdict((16, 32), head_dim=64) == (False, "3: n = 32, a single warp's step is 16 tokens")


def test_the_command_prints_a_table(capsys):
    assert cli.main(["--device", "h200", "--log", str(LOG)]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200, head_dim 128, float16" in shown
    hopper = shown[shown.index("hopper: 1 x 384 threads an SM, 168 registers a thread") :].splitlines()
    (line,) = (line for line in hopper if line.split()[:3] == ["*", "64", "64"])
    assert line.split()[3:5] == ["2", "131072"] and line.endswith("yes")
    (line,) = (line for line in hopper if line.split()[:3] == ["*", "128", "64"])
    assert line.split()[3:5] == ["1", "131072"] and line.endswith("yes")
    (line,) = (line for line in hopper if line.split()[:3] == ["+", "64", "32"])
    assert line.endswith("yes")


def test_the_command_warns_of_nothing():
    command = [sys.executable, "-W", "error", "-m", "feather_kernels.tune", "--device", "h200", "--log", str(LOG)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--device", "h300"], ["--device", "h200", "--measure"], ["--stages", "1"],
        ["--profile", "--head-dim", "64"], ["--profile", "--dtype", "bfloat16"],
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(wrong, capsys):
    assert cli.main(wrong) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("feather_kernels.tune: error: ")


def test_a_profile_is_read_back_as_it_was_saved(tmp_path):
    H200.save(tmp_path / "copy.json")
    assert Device.load(tmp_path / "copy.json") == H200
    assert H200.profile.name == "h200.json"
    with pytest.raises(BuildError, match=r"no device profile h300: there is .*h200"):
        Device.load("h300")


def test_a_profile_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Device, "of", lambda: H200)
    monkeypatch.setattr(cli, "profile_n", lambda path, *_: H200.n_rule[path])
    assert cli.main(["--profile", "--out", str(tmp_path / "no" / "such.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"feather_kernels.tune: error: cannot write {tmp_path}/no/such.json: No such file")


def test_latency_is_the_flat_part():
    pytest.importorskip("torch")
    from feather_kernels.tune.memory_probe import flat_part

    assert flat_part([600.0, 610.0, 650.0, 800.0, 1500.0]) == 620.0  # 660 is the limit
    assert flat_part([600.0, 700.0, 610.0]) == 600.0


PORTABLE = [Device.load(file) for file in sorted(PROFILES.glob("*.json"))]


@pytest.mark.parametrize("gpu", PORTABLE, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_portable_tiles_fit_every_gpu_of_a_profile(gpu, head_dim):
    chosen = tiles.built_tiles("portable", head_dim, gpu.shared_kb)
    unmeasured = replace(gpu, latency_ns=None)
    how = KernelPath.of("portable", head_dim, gpu.shared_kb)
    assert [m for m, _ in chosen] == [8, 16, 32, 64] and all(how.teams(m) for m, _ in chosen)
    # The rings of all tiles lie in the same place, and a sharing warp's or team's has two stages.
    rings = 4 * portable_ring(head_dim, gpu.shared_kb)
    for m, n in chosen[1:]:
        assert how.teams(m) * 2 * 2 * n * head_dim * 2 <= rings
    assert how.blocks * (rings + RESERVED) <= gpu.shared_per_sm and rings <= gpu.shared_per_block
    if how.teams(16) == 4:
        assert all(verdict.ok for verdict in feasible_tiles(unmeasured, head_dim, 2, {}, chosen, "portable"))


def test_what_a_processor_runs_at_once_follows_from_its_shared_memory():
    def warps(profile: str, head_dim: int) -> int:
        return tail_warps_of("portable", head_dim, Device.load(profile).shared_kb)

    assert [warps(profile, 128) for profile in ("b200", "a100", "l40s", "rtx-pro-6000")] == [8, 8, 4, 4]
    assert [warps(profile, 256) for profile in ("b200", "a100", "l40s")] == [4, 4, 4]
    assert KernelPath.of("portable", 256, 100).teams(16) == 3


def test_a_smaller_gpus_limits_can_be_kept_on_a_larger_one():
    hopper = replace(Device.load("h200"), name="NVIDIA H200")
    assert (hopper.path, hopper.shared_kb, hopper.limited_kb) == ("hopper", 228, 0)
    limited = replace(hopper, shared_per_sm=Device.load("l40s").shared_per_sm)
    assert (limited.path, limited.shared_kb, limited.limited_kb) == ("portable", 100, 100)
    library = Configuration("bfloat16", 256, 90, shared_kb=limited.limited_kb)
    assert {"-DFEATHER_HOPPER=0", "-DFEATHER_SHARED_KB=100"} < set(library.flags)
    assert library.name.endswith("_100kb_sm90a")
    ada = Device.load("l40s")
    assert (ada.path, ada.limited_kb) == ("portable", 0)
    assert "-DFEATHER_SHARED_KB=100" in Configuration("bfloat16", 256, 89).flags


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "head_dim", "fp8"), [(80, 64, True), (89, 256, False), (120, 128, False)])
def test_the_compiler_accepts_a_gpus_limits(capability, head_dim, fp8):
    """Shared memory is checked while it compiles (csrc/sm80/forward.cuh); registers are in its report."""
    configuration = Configuration("bfloat16", head_dim, capability, fp8_kv=fp8)
    try:
        library = compiled_kernel(configuration)
    except BuildError as error:
        if "no nvcc" in str(error) or "no CUTLASS" in str(error):
            pytest.skip(str(error))
        raise
    report = register_report(library.with_suffix(".log").read_text())
    (forward,) = (registers for name, registers in report.items() if "PortableForward" in name)
    how = KernelPath.of("portable", head_dim, SHARED_KB[capability])
    assert forward.spilled == 0
    assert how.blocks * how.threads * forward.used <= 65536
