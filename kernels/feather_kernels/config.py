"""The configuration of the kernels: an attention layer, its types, and a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from feather_kernels.build import load_kernel
from feather_kernels.device import Device
from feather_kernels.options import BY_DEFAULT, tail_warps_of
from feather_kernels.paths import MOST_SHARED, KernelPath
from feather_kernels.tiles import built_tiles, chosen_tiles, n_choices

PATHS = ("auto", "portable", "hopper")
FP8 = torch.float8_e4m3fn
_WARP_ROWS = 16  # the most that a single warp's tile has: such a unit can merge


@dataclass(frozen=True)
class KernelConfig:
    """An attention layer on a GPU. Fields that are left out or "auto" get their values when it is made.

    Attributes
    ----------
    num_qo_heads, num_kv_heads : int
        Query heads and KV heads; the first a multiple of the second.
    head_dim : {64, 128, 256}
    dtype : torch.dtype
        float16 or bfloat16, of queries, output, and caches unless they have another.
    kv_dtype : torch.dtype, optional
        float8_e4m3fn: of caches that hold values divided by a scale a tensor.
    device : torch.device or str, optional
        Default "cuda": the current one.
    path : {"auto", "portable", "hopper"}
        Copy instructions: those of compute capability 8.0, or those of 9.0.
    tiles : sequence of (m, n), optional
        The tile shapes to use: the largest one or more of `feather_kernels.tiles.built_tiles`; another n of
        `feather_kernels.tiles.n_choices` is another library. By default all, with the n that the GPU's profile has for
        long KV (`feather_kernels.tiles.chosen_tiles`), if the path is the one for this GPU.
    causal_tails : bool
        For plans of `PlannerOptions.causal_tails`, on the Hopper path.

    Raises
    ------
    ValueError
        A value that is not supported.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype = BY_DEFAULT
    device: torch.device = BY_DEFAULT
    path: str = "auto"
    tiles: tuple[tuple[int, int], ...] = BY_DEFAULT
    causal_tails: bool = False
    shared_kb: int = field(init=False, repr=False, default=MOST_SHARED)  # of a processor of the GPU
    limited_kb: int = field(init=False, repr=False, default=0)  # `Device.limited_kb`

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.num_qo_heads) < 1 or self.num_qo_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_qo_heads} query heads on {self.num_kv_heads} KV heads: give a multiple")
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {self.dtype}: use torch.float16 or torch.bfloat16")
        if self.kv_dtype not in (None, self.dtype, FP8):
            raise ValueError(f"kv_dtype is {self.kv_dtype}: use {self.dtype}, as queries have, or {FP8}")
        if self.path not in PATHS:
            raise ValueError(f"path is {self.path!r}: use one of {', '.join(PATHS)}")
        device = cuda_device(self.device)
        self._settle(device=device, kv_dtype=self.kv_dtype or self.dtype)
        major, minor = torch.cuda.get_device_capability(device)
        gpu = Device.of(device)
        own = replace(gpu, capability=10 * major + minor)
        if self.path == "hopper" and own.path != "hopper":
            raise ValueError(f"path is 'hopper', but {torch.cuda.get_device_name(device)} is compute {major}.{minor}")
        path = "portable" if self.path == "portable" else own.path
        rules = own.n_rule if path == own.path else {}
        tiles = sorted((m, n) for m, n in self.tiles or chosen_tiles(path, self.head_dim, rules, own.shared_kb))
        self._settle(path=path, tiles=tuple(tiles), shared_kb=own.shared_kb, limited_kb=own.limited_kb)
        self._check_tiles()
        if self.causal_tails and path != "hopper":
            raise ValueError("causal_tails is True: that needs the path 'hopper'")

    def _settle(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _check_tiles(self) -> None:
        built = built_tiles(self.path, self.head_dim, self.shared_kb)
        if [m for m, _ in self.tiles] != [m for m, _ in built[-len(self.tiles) :]]:
            raise ValueError(f"tiles are {self.tiles}: use the largest one or more of {built}")
        if self.group_size > self.tiles[-1][0]:
            raise ValueError(f"{self.group_size} query heads to a KV head: the largest tile holds {self.tiles[-1][0]}")
        for _, m, n in self.other_tiles:
            if n not in (choices := n_choices(self.path, m, self.head_dim, self.shared_kb)):
                raise ValueError(f"tiles are {self.tiles}: for m = {m} n may be {choices}")

    @property
    def group_size(self) -> int:
        """Query heads to a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def part_rows(self) -> int:
        """Rows of a part: one a query head."""
        return self.num_qo_heads

    @property
    def part_dim(self) -> int:
        """Values of each of them."""
        return self.head_dim

    @property
    def other_tiles(self) -> tuple[tuple[str, int, int], ...]:
        """(path, m, n) of those with another n than they are built with by default."""
        built = built_tiles(self.path, self.head_dim, self.shared_kb)
        return tuple((self.path, m, n) for m, n in self.tiles if (m, n) not in built)

    @property
    def may_fuse(self) -> bool:
        """Whether a unit of one launch can merge a request's parts: a warp's tile holds the query heads."""
        return max(self.tiles[0][0], self.group_size) <= _WARP_ROWS

    @property
    def planner_defaults(self) -> dict[str, Any]:
        """How plans are made unless another way is named: as was measured best on the path."""
        hopper = self.path == "hopper"
        how = KernelPath.of(self.path, self.head_dim, self.shared_kb)
        return {
            "alpha": None if hopper else tuple(1 / how.teams_per_processor(m) for m, _ in self.tiles),
            "strategy": "time" if hopper else "profit", "split": "rounds" if hopper else "balanced",
            "tail_warps": tail_warps_of(self.path, self.head_dim, self.shared_kb),
            "kv_value_bytes": self.kv_dtype.itemsize, "causal_tails": self.causal_tails,
        }  # fmt: skip

    def load(self, soft_cap: bool, sinks: bool) -> Any:
        """The kernels with or without a soft cap and attention sinks, compiled if need be, which takes a minute."""
        major, minor = torch.cuda.get_device_capability(self.device)
        name = str(self.dtype).removeprefix("torch.")
        kind = soft_cap, self.other_tiles, sinks, self.kv_dtype == FP8, self.causal_tails
        limits = {"shared_kb": self.limited_kb} if self.limited_kb else {}
        return load_kernel(name, self.head_dim, 10 * major + minor, *kind, **limits)


def cuda_device(device: torch.device | str | None) -> torch.device:
    """A CUDA device with its index, the current one by default; raises ``ValueError`` for one of another kind."""
    found = torch.device(device or "cuda")
    if found.type != "cuda":
        raise ValueError(f"device is {found}: the kernels need a CUDA device")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
