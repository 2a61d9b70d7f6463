"""Prebuilt libraries, in the folder ``$FEATHER_KERNELS_PREBUILT`` and in the wheel ``feather-kernels``.

A library's file name ends in a key of its sources and flags, so that one of other sources is never taken. The wheel
has a manifest with the digest of each file, which is compared before the library is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = "FEATHER_KERNELS_PREBUILT"
DISTRIBUTION, PACKAGE, MANIFEST = "feather-kernels", "feather_kernels_prebuilt", "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The manifest of a wheel's libraries.

    Attributes
    ----------
    version : str
        The wheel's.
    toolkit : mapping
        What each compiler says of itself.
    libraries : mapping
        SHA-256 of each file, by its name.
    """

    version: str
    toolkit: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def kernels(self) -> int:
        """How many of the libraries are kernels of a GPU."""
        return sum(name.startswith("packed_decode") for name in self.libraries)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """From text; raises ``ValueError`` for other text."""
        try:
            fields = json.loads(text)
            libraries = {str(name): str(digest) for name, digest in fields["libraries"].items()}
            return cls(str(fields["version"]), dict(fields["toolkit"]), libraries)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(str(error)) from None


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def find(name: str, file: str) -> Path | None:
    """The library with this file name; ``name`` is the part of it that tells no versions apart.

    A wheel that has the library from other sources, or damaged, has one warning and no library.
    """
    folder = os.environ.get(FOLDER)
    if folder and (Path(folder) / file).is_file():
        return Path(folder) / file
    if (place := _package()) is None or (manifest := _manifest(place)) is None:
        return None
    if file not in manifest.libraries:
        if any(other.rpartition("-")[0] == name for other in manifest.libraries):
            logger.warning(
                "%s %s has %s from other sources and is not used for it: install the %s of this feather-sglang",
                DISTRIBUTION, manifest.version, name, DISTRIBUTION,
            )  # fmt: skip
        return None
    library = place / file
    if not library.is_file() or digest(library) != manifest.libraries[file]:
        logger.warning("%s is damaged or missing and is not used: reinstall %s", library, DISTRIBUTION)
        return None
    return library


def describe() -> str | None:
    """The installed wheel in words; None without one."""
    if (place := _package()) is None:
        return None
    if (manifest := _manifest(place)) is None:
        return f"{DISTRIBUTION} is damaged"
    return f"{DISTRIBUTION} {manifest.version} with {manifest.kernels} kernels and the planner"


def has_kernels() -> bool:
    """Whether the installed wheel has any kernel, and not the planner alone."""
    manifest = None if (place := _package()) is None else _manifest(place)
    return manifest is not None and manifest.kernels > 0


def _package() -> Path | None:
    """The folder of the wheel's package."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@functools.cache
def _manifest(place: Path) -> Manifest | None:
    """A package's manifest; None, and one warning, if it cannot be read."""
    try:
        return Manifest.from_json((place / MANIFEST).read_text())
    except (OSError, ValueError):
        logger.warning("%s is damaged or missing: reinstall %s", place / MANIFEST, DISTRIBUTION)
        return None
