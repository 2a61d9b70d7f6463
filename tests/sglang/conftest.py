"""Tests against the installed SGLang, whatever supported release that is."""

import importlib.util
import random
import secrets

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs an installed SGLang", allow_module_level=True)

from feather_sglang.adapter import cpu_shims, failures

cpu_shims.install()


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch):
    """Every test begins in a program of the user's, although others have had SGLang read its flags in this process."""
    monkeypatch.setattr(failures, "_command_line", False)


@pytest.fixture(autouse=True)
def known_hash_seeds(monkeypatch):
    """What a server draws in secret is the same in every run: the order of rows follows it, and with that evictions."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.fixture
def server(tmp_path):
    """Makes real schedulers, under feather-bandit unless told otherwise, and closes them after the test."""
    from harness import Server

    made = []

    def make(policy="feather-bandit", **overrides):
        made.append(Server(tmp_path, policy, **overrides))
        return made[-1]

    yield make
    for one in made:
        one.close()
