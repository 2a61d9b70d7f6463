"""GPU models: limits, measurements, and the rule for n (PAT 5.2)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from feather_kernels.errors import BuildError
from feather_kernels.paths import SHARED_KB

Piece = tuple[int | None, int]  # longest KV of the piece (None: no limit), its n

PROFILES = Path(__file__).resolve().parent / "devices"
LIMITS = "FEATHER_KERNELS_LIMITS"  # the variable with a profile whose shared memory this GPU's kernels keep to


@dataclass(frozen=True)
class NRule:
    """The rule for n: for each m, its pieces in order of KV length, the last of which has no limit."""

    pieces: Mapping[int, tuple[Piece, ...]]

    def choose_n(self, m: int, kv_len: int) -> int:
        """The n for m query rows that read ``kv_len`` tokens.

        Raises
        ------
        ValueError
            A rule without this m.
        """
        if m not in self.pieces:
            raise ValueError(f"no rule for m = {m}: it has {', '.join(map(str, self.pieces))}")
        return next(n for longest, n in self.pieces[m] if longest is None or kv_len <= longest)

    @classmethod
    def from_json(cls, rule: Mapping[str, Sequence[Sequence[Any]]]) -> NRule:
        """From a profile: ``{m: [[longest, n], ...]}``."""
        return cls({int(m): tuple((longest, n) for longest, n in pieces) for m, pieces in rule.items()})

    def to_json(self) -> dict[str, list[list[int | None]]]:
        """As a profile holds it."""
        return {str(m): [list(piece) for piece in pieces] for m, pieces in self.pieces.items()}


@dataclass(frozen=True)
class Device:
    """The numbers of one GPU model; ``devices/*.json`` holds the measured ones.

    Attributes
    ----------
    name : str
        As the driver reports it.
    capability : int
        Compute capability times ten.
    n_sm : int
        Multiprocessors.
    shared_per_sm, shared_per_block : int
        Bytes of shared memory; the second is what a block may opt in to.
    registers_per_sm, registers_per_thread : int
        32-bit registers.
    latency_ns : float or None
        L: latency of a copy from global to shared memory, None until measured.
    bandwidth : float or None
        B: bytes per ns of a device-to-device copy, read and written bytes both counted; None until measured.
    n_rule : dict of str to NRule
        The selector's rule of each path.
    """

    name: str
    capability: int
    n_sm: int
    shared_per_sm: int
    shared_per_block: int
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    latency_ns: float | None = None
    bandwidth: float | None = None
    n_rule: dict[str, NRule] = field(default_factory=dict)

    @classmethod
    def of(cls, device: Any = None) -> Device:
        """A torch device (the current one by default), with its model's measured numbers where there is a profile."""
        import torch

        if not torch.cuda.is_available():
            raise BuildError("torch sees no NVIDIA GPU: name a profile with --device, or run this where there is one")
        found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
        static = cls(
            found.name,
            10 * found.major + found.minor,
            found.multi_processor_count,
            found.shared_memory_per_multiprocessor,
            found.shared_memory_per_block_optin,
            found.regs_per_multiprocessor,
        )
        if limits := os.environ.get(LIMITS):
            least = cls.load(limits)
            return replace(
                static,
                shared_per_sm=min(static.shared_per_sm, least.shared_per_sm),
                shared_per_block=min(static.shared_per_block, least.shared_per_block),
            )
        if not static.profile.is_file():
            return static
        known = cls.load(static.profile)
        return replace(static, latency_ns=known.latency_ns, bandwidth=known.bandwidth, n_rule=known.n_rule)

    @classmethod
    def load(cls, profile: str | Path) -> Device:
        """A profile by path, or by name (``h200``)."""
        file = profile if isinstance(profile, Path) else PROFILES / f"{profile}.json"
        if not file.is_file():
            have = ", ".join(sorted(known.stem for known in PROFILES.glob("*.json")))
            raise BuildError(f"no device profile {file.stem}: there is {have}")
        fields = json.loads(file.read_text())
        rules = {path: NRule.from_json(rule) for path, rule in fields.pop("n_rule", {}).items()}
        return cls(**fields, n_rule=rules)

    @property
    def shared_kb(self) -> int:
        """The shared memory of a processor, of the sizes that kernels are built for."""
        own = min(self.shared_per_sm // 1024, SHARED_KB.get(self.capability, self.shared_per_sm))
        return max((size for size in SHARED_KB.values() if size <= own), default=min(SHARED_KB.values()))

    @property
    def limited_kb(self) -> int:
        """The same where it is less than GPUs of this compute capability have (``FEATHER_KERNELS_LIMITS``), else 0."""
        return self.shared_kb if self.shared_kb < SHARED_KB.get(self.capability, 0) else 0

    @property
    def path(self) -> str:
        """The path of the kernels that is made for it."""
        return "hopper" if self.capability == 90 and not self.limited_kb else "portable"

    @property
    def profile(self) -> Path:
        """Where this model's profile is kept: "NVIDIA H200" in ``devices/h200.json``."""
        words = self.name.lower().removeprefix("nvidia ").split()
        return PROFILES / f"{'-'.join(words)}.json"

    def save(self, file: Path) -> None:
        """Write the profile as JSON."""
        fields = {**asdict(self), "n_rule": {path: rule.to_json() for path, rule in self.n_rule.items()}}
        try:
            file.write_text(json.dumps(fields, indent=2) + "\n")
        except OSError as error:
            raise BuildError(f"cannot write {file}: {error.strerror}; name another file with --out") from None
