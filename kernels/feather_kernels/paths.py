"""The kernels' paths: threads, warps, and the teams that share a KV tile."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP = 4  # warps; 64 rows of wgmma
SHARED_KB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # of a processor, by compute capability x 10
MOST_SHARED = max(SHARED_KB.values())


@dataclass(frozen=True)
class KernelPath:
    """The threads, warps and teams of one path of ``csrc``, for one head dimension.

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
    single_teams : int
        Teams of one warp that share packs, at most: so many rings have room.
    """

    name: str
    kernel: str
    threads: int
    warps: int
    blocks: int
    single_teams: int

    @classmethod
    def of(cls, name: str, head_dim: int, shared_kb: int = MOST_SHARED) -> KernelPath:
        """The constants of ``csrc/traits.h``, on a processor with so much shared memory."""
        if name == "portable":
            blocks = 2 if head_dim <= 128 and shared_kb >= SHARED_KB[80] else 1
            rings = 4 * portable_ring(head_dim, shared_kb)
            return cls(name, "PortableForward", 128, 4, blocks, min(4, rings // (2 * 2 * 16 * head_dim * 2)))
        groups = 2 if head_dim <= 128 else 1
        return cls(name, "HopperForward", 128 * (groups + 1), 4 * groups, 1, 4 * groups)

    def team_warps(self, m: int) -> int:
        """Warps that share a KV tile: 16 rows each, or 64 a warpgroup."""
        return max(1, m // 16)

    def teams(self, m: int) -> int:
        """Teams a block. On the Hopper path units of eight rows run on the copying warps too."""
        warps = self.threads // 32 if self.name == "hopper" and m == 8 else self.warps
        return min(warps, self.single_teams) if m == 16 else warps // self.team_warps(m)

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


def portable_ring(head_dim: int, shared_kb: int) -> int:
    """Bytes of a warp's ring of KV on the portable path, for values of 16 bits."""
    if head_dim > 128:
        return (32 if shared_kb >= SHARED_KB[80] else 24) * 1024
    if shared_kb >= MOST_SHARED:
        return 24 * 1024
    return (20 if shared_kb < SHARED_KB[80] else 16 if head_dim == 64 else 18) * 1024
