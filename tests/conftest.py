"""Puts this folder on the import path, so that tests import their oracles as ``oracles.<name>``."""

import atexit
import gc
import os
import shlex
import sys
import sysconfig
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from preloaded import ADDRESS, Preloaded

TESTS = Path(__file__).resolve().parent

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


def without_a_gpu() -> dict[str, str]:
    """Variables for SGLang where nobody asks for a GPU or a network."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list) -> None:
    """Fork the processes that run tests from one that has imported SGLang, where this environment is one without a GPU.

    Else each of them imports it, and so do the servers and programs that they start.
    """
    import execnet

    from feather_sglang.adapter import cpu_shims

    chosen = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    needed = [TESTS / "server", TESTS / "sglang"]
    touched = any(one.is_relative_to(path) or path.is_relative_to(one) for one in needed for path in chosen)
    if not touched or not (Path(sysconfig.get_path("purelib")) / cpu_shims.PTH_NAME).exists():
        return
    made = Preloaded.start(without_a_gpu())
    config.add_cleanup(made.close)
    os.environ[ADDRESS] = made.address
    python = shlex.join([sys.executable, str(TESTS / "preloaded.py"), made.address])
    specs[:] = [execnet.XSpec(f"popen//python={python}") for _ in specs]


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """A Python that has imported SGLang already: the one that this process comes from, or one of its own."""
    if address := os.environ.get(ADDRESS):
        yield Preloaded(address)
    else:
        made = Preloaded.start(without_a_gpu())
        yield made
        made.close()
