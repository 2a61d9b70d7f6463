"""The kernels' machine code equals that in ``machine_code.json``, where the same compiler is installed.

A change that is meant to compile to something else records anew: ``python tests/behaviour/machine_code.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from feather_kernels.errors import BuildError

sys.path.insert(0, str(Path(__file__).parent))

from machine_code import CASES, REFERENCE, machine_code, nvcc_version

KNOWN = json.loads(REFERENCE.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_compile_to_the_recorded_code(case: str) -> None:
    try:
        found = nvcc_version()
        if found != KNOWN["nvcc"]:
            pytest.skip(f"recorded with nvcc {KNOWN['nvcc']}, here is {found}")
        digests = machine_code(case)
    except BuildError as error:
        pytest.skip(str(error))
    assert digests == KNOWN[case]
