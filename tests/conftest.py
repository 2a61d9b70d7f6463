"""Puts this folder on the import path, so that tests import their oracles as ``oracles.<name>``."""

import atexit
import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, and for the processes that tests start: to models this small, threads that wait for each
# other cost more than they bring, and several times the work where other tests keep the cores busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine makes single examples slow; that says nothing about the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first: where files are dealt to several processes, the longest one must not start last."""
    items.sort(key=lambda item: "server" not in item.path.parts)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported here: it stays.

    That takes seconds, and again whenever SGLang collects garbage, as it does for every scheduler.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # or nanobind reports what lies there as leaked
