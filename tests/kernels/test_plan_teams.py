"""The planner's idea of a processor: the warps and teams of the kernel's path, for its head dimension."""

import pytest
from plan_checks import plan_of

from feather_kernels.build import HEAD_DIMS
from feather_kernels.forest import Forest
from feather_kernels.options import tail_warps_of
from feather_kernels.paths import KernelPath
from feather_kernels.plan import Planner
from feather_kernels.tiles import TILES, built_tiles
from feather_kernels.trees import tree_forest


@pytest.mark.parametrize(
    ("path", "head_dim", "warps"),
    [("hopper", 64, 12), ("hopper", 128, 12), ("hopper", 256, 8), ("portable", 128, 8), ("portable", 256, 4)],
)
def test_tail_warps_are_the_kernels(path, head_dim, warps):
    assert tail_warps_of(path, head_dim) == warps
    if path == "hopper":
        assert Planner(8, 2, head_dim, max_requests=1).options.tail_warps == warps
    assert Planner(8, 2, head_dim, max_requests=1, tail_warps=5).options.tail_warps == 5


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", TILES)
def test_a_long_shared_pack_has_a_chunk_for_every_team(path, head_dim):
    tiles = built_tiles(path, head_dim)
    for m, n in tiles[1:]:  # the first is that of tails
        requests, tokens = m // 4, 8192 * n
        plan = plan_of(
            tree_forest((1, requests), (tokens, 1)), head_dim=head_dim, tiles=((8, 16), (m, n)), n_sm=1, num_kv_heads=1,
            num_qo_heads=4, split="balanced", strategy="naive", max_parts=None,
        )  # fmt: skip
        shared = plan.items[plan.items[:, 6] == requests]
        assert len(shared) == KernelPath.of(path, head_dim).teams_per_processor(m)


def test_tails_of_8_bits_are_left_to_single_warps():
    for size, m in ((2, 64), (1, 8)):
        plan = plan_of(tree_forest((256,), (1024,)), num_qo_heads=32, num_kv_heads=8, kv_value_bytes=size)
        assert {plan.options.tiles[tile][0] for tile in plan.items[:, 7]} == {m}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tails_are_cut_for_the_warps_of_the_hopper_path(head_dim):
    """Where they are all there is, for two of three; beside a shared pack in a larger tile, for all."""
    warps = tail_warps_of("hopper", head_dim)
    arguments = {"head_dim": head_dim, "n_sm": 1, "num_kv_heads": 1, "num_qo_heads": 8, "fan_in": 0}
    assert plan_of(tree_forest((1,), (1 << 16,)), **arguments).n_items == warps * 2 // 3
    forest = Forest([-1], [500], [0] * 8 + [-1], [500] * 8 + [1 << 16], [*range(0, 8 * 1000, 1000), 8000])
    plan = plan_of(forest, **arguments, split="balanced", strategy="naive")
    assert (plan.items[:, 8] == 8).sum() == warps
