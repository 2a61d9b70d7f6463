"""Prefix-packed decode attention: plan on the CPU, forward and merge on the GPU. Importing it needs neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feather_kernels.costs import UnitCosts
from feather_kernels.errors import BuildError, PlanError
from feather_kernels.forest import Forest
from feather_kernels.plan import PackPlan, Planner, make_plan
from feather_kernels.trees import PAT_TREES, parse_tree, tree_forest

if TYPE_CHECKING:
    from feather_kernels.wrapper import PackedDecodeWrapper

__all__ = [
    "PAT_TREES",
    "BuildError",
    "Forest",
    "PackPlan",
    "PackedDecodeWrapper",
    "PlanError",
    "Planner",
    "UnitCosts",
    "make_plan",
    "parse_tree",
    "tree_forest",
]


def __getattr__(name: str) -> Any:
    """The wrapper needs torch; planning does not."""
    if name == "PackedDecodeWrapper":
        from feather_kernels.wrapper import PackedDecodeWrapper

        return PackedDecodeWrapper
    raise AttributeError(f"module 'feather_kernels' has no attribute {name!r}")
