"""Some of the inputs that ``dev.py fuzz`` gives to whatever feather reads, and limits on sizes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path

import pytest

from faults import fuzz
from feather_kernels.errors import PlanError
from feather_kernels.plans import batch_file
from feather_sglang.errors import FeatherError
from feather_sglang.replay import lines, traces
from feather_sglang.scheduling.policies import load_policy, policy_file

ROOT = Path(__file__).parents[2]
EACH = 150


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    return fuzz.readers(tmp_path_factory.mktemp("inputs"))


READERS = [
    "trace",
    "import",
    "policy file",
    "batch file",
    "flags",
    "switch order",
    "options",
    "tree",
    "bounds",
    "profile",
]


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_read_or_refused_in_one_line(readers, name):
    assert set(READERS) == set(readers)
    for content in readers[name].good:
        readers[name].read(content)
    refused = 0
    for number in range(EACH):
        refused += fuzz.give(name, readers[name], number)
    assert 0 < refused <= EACH


def test_a_fault_is_found(readers):
    """What is neither read nor refused in one line."""
    for read in (lambda content: 1 / 0, lambda content: exec("raise FeatherError('two\\nlines')", globals())):
        with pytest.raises((ZeroDivisionError, AssertionError)):
            fuzz.give("trace", fuzz.Reader(read, readers["trace"].good), 0)


@pytest.mark.parametrize(
    ("module", "limit", "load"),
    [
        (policy_file, "LARGEST_FILE", load_policy),
        (batch_file, "LARGEST_FILE", batch_file.load_batch),
        (lines, "LONGEST_LINE", traces.load_trace),
    ],
    ids=["policy file", "batch file", "trace"],
)
def test_no_more_is_read_than_a_file_can_have(module, limit, load, monkeypatch, tmp_path):
    """A device without an end, too: it would fill the memory."""
    path = tmp_path / "endless.json"
    path.symlink_to("/dev/zero")
    monkeypatch.setattr(module, limit, 1 << 16)
    with pytest.raises((FeatherError, PlanError), match=r"^[^\n]*more than 65536 bytes|longer than 65536 bytes[^\n]*$"):
        load(path)


def test_no_more_is_read_of_an_order_than_one_can_have():
    from feather_sglang.adapter.switch import endpoint

    read = []

    class Request:
        async def stream(self):
            for _ in range(1000):
                read.append(1 << 14)
                yield b" " * (1 << 14)

    with pytest.raises(FeatherError, match="more than 65536 bytes"):
        asyncio.run(endpoint._body(Request()))
    assert sum(read) <= 2 * endpoint.LARGEST


def test_nothing_is_pickled():
    """What is unpickled runs as code."""
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    product = [name for name in files.split() if name.startswith(("feather_sglang/", "kernels/"))]
    loads = re.compile(r"\b(pickle|dill|marshal|shelve|joblib|torch\.load|allow_pickle=True)\b")
    assert len(product) > 100
    assert [name for name in product if loads.search((ROOT / name).read_text())] == []


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    """Killed while it writes: policies, traces and results are files that exist whole or not at all."""
    from feather_sglang.file_writing import replace_text

    path = tmp_path / "policy.json"
    replace_text(path, "old", "policy file")
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda descriptor: os.kill(os.getpid(), 9)
        replace_text(path, "new" * 1000, "policy file")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert path.read_text() == "old"
