"""The part of the suite that runs: `dev.py full` runs all of it, `dev.py test` and plain pytest a part.

The part has each behaviour, but fewer samples of a sweep; and on an older SGLang only what may differ there.
"""

import os
from importlib import metadata

import pytest

from feather_sglang.adapter.hooks import SUPPORTED

FULL = bool(os.environ.get("FEATHER_TESTS_FULL"))
NEWEST = SUPPORTED[-1]


def samples(full: int, part: int) -> int:
    """How many examples, seeds or rounds of a sweep to try."""
    return full if FULL else part


def on_newest() -> bool:
    try:
        return metadata.version("sglang") == NEWEST
    except metadata.PackageNotFoundError:
        return False


# What is tested is above the seam to SGLang, or takes long, and is seen on one release.
newest_is_enough = pytest.mark.skipif(
    not FULL and not on_newest(), reason=f"the same on every release: runs on SGLang {NEWEST}; dev.py full runs it here"
)
full_only = pytest.mark.skipif(not FULL, reason="one more sample: dev.py full runs it")
