"""How the kernels run tiles on each path: threads, warps, and the teams that share a KV tile."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP = 4  # warps; 64 rows of wgmma


@dataclass(frozen=True)
class KernelPath:
    """How ``csrc`` runs tiles on one path, for one head dimension.

    Attributes
    ----------
    name : str
        "portable" (mma.sync) or "hopper" (wgmma for m = 64 and 128, else mma.sync).
    kernel : str
        A part of its kernel's name in the compiler's report. All tiles of a path are one kernel.
    threads, warps : int
        Of a block: all of them, and the warps that compute.
    blocks : int
        On a multiprocessor.
    """

    name: str
    kernel: str
    threads: int
    warps: int
    blocks: int

    @classmethod
    def of(cls, name: str, head_dim: int) -> KernelPath:
        """The constants of ``csrc/traits.h``."""
        if name == "portable":
            return cls(name, "PortableForward", 128, 4, 2 if head_dim <= 128 else 1)
        groups = 2 if head_dim <= 128 else 1
        return cls(name, "HopperForward", 128 * (groups + 1), 4 * groups, 1)

    def team_warps(self, m: int) -> int:
        """Warps that share a KV tile: 16 rows each, or 64 a warpgroup."""
        return max(1, m // 16)

    def teams(self, m: int) -> int:
        """Teams a block. On the Hopper path units of eight rows run on the copying warps too."""
        warps = self.threads // 32 if self.name == "hopper" and m == 8 else self.warps
        return warps // self.team_warps(m)

    def teams_per_processor(self, m: int) -> int:
        """Teams of warps with a tile of m rows on one processor."""
        return self.blocks * self.teams(m)

    def copies(self, m: int) -> int:
        """KV tiles that are copied for a block at the same time: one a team, but two for m = 128.

        A warpgroup has two warps that copy for it, K and V. Two that are one team have four, and a ring with the stages
        of both.
        """
        return self.warps // WARPGROUP if self.uses_wgmma(m) else self.teams(m)

    def uses_wgmma(self, m: int) -> bool:
        """Whether a tile of m rows is multiplied by warpgroups."""
        return self.name == "hopper" and m > 16
