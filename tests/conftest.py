"""Puts this folder on the import path, so that tests import their oracles as ``oracles.<name>``."""

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow; that says nothing about the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first: where files are dealt to several processes, the longest one must not start last."""
    items.sort(key=lambda item: "server" not in item.path.parts)
