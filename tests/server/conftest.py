"""Servers and reference answers for the tests of this folder; each server is started once and used by several tests."""

from __future__ import annotations

import fcntl
import os
import pickle
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_wheel import PLANNER_ALONE, build_wheel, install, without_compilers
from preloaded import Preloaded
from server.cases import CASES, KEY, ROOMY, FeatherServer
from server.sglang_server import SERVE, SGLangServer
from server.tiny_model import write_model
from server.workload import Answer, Request, grouped_requests, stream_all


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "of_cases(trait): runs on the servers whose case has that trait, not on all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "feather_server" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("of_cases")
        names = [name for name, case in CASES.items() if marker is None or getattr(case, marker.args[0])]
        metafunc.parametrize("feather_server", names, indirect=True, scope="module")


@pytest.fixture(scope="session")
def prepared() -> None:
    """SGLang can start without a GPU in this environment."""
    from feather_sglang.adapter import cpu_shims

    if not (Path(sysconfig.get_path("purelib")) / cpu_shims.PTH_NAME).exists():
        pytest.fail(
            "this environment cannot start SGLang without a GPU: run python -m feather_sglang.adapter.cpu_shims"
        )


@pytest.fixture(scope="session")
def model(prepared: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    return grouped_requests()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' output goes: the folder named by FEATHER_TEST_LOGS, which is kept, or a temporary one."""
    kept = os.environ.get("FEATHER_TEST_LOGS")
    return Path(kept) if kept else tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def fcfs(
    model: Path, logs: Path, preloaded: Preloaded, requests: list[Request], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Answer]]:
    """Answers under fcfs: of all requests at once, and of the same requests, last first, eight at a time.

    The first of the processes that run tests to need them asks a server; the others wait and read what it was told.
    """
    folder = tmp_path_factory.getbasetemp()
    kept = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "fcfs.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with SGLangServer(model, logs / "fcfs.txt", "--schedule-policy", "fcfs", *ROOMY, start=preloaded) as server:
                answers = [stream_all(server.url, requests), stream_all(server.url, requests[::-1], concurrency=8)]
            kept.write_bytes(pickle.dumps(answers))
    return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which a server has the planner of the wheel ``feather-kernels``, and may compile nothing."""
    folder = tmp_path_factory.mktemp("kernels")
    return without_compilers(install(build_wheel(folder, *PLANNER_ALONE), folder / "site"), folder / "cache")


@pytest.fixture(scope="module")
def feather_server(
    request: pytest.FixtureRequest,
    model: Path,
    logs: Path,
    preloaded: Preloaded,
    fcfs: object,
    compiled: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FeatherServer]:
    """The server of one case; after every scheduling step it checks its tree against SGLang's queues."""
    case = CASES[request.param]
    recorded = tmp_path_factory.mktemp("recorded")
    recording = ("--feather-record-trace", str(recorded)) if case.records else ()
    flags = ("--schedule-policy", case.policy, *case.flags, *recording)
    environment = {"FEATHER_DEBUG_CHECK": "1", **compiled, **case.environment}
    how = {"start": SERVE if case.serve else preloaded, "key": KEY if case.switches else None}
    with SGLangServer(model, logs / f"{request.param}.txt", *flags, **how, **environment) as server:
        yield FeatherServer(case, server, recorded)


@pytest.fixture(scope="module")
def served(feather_server: FeatherServer, requests: list[Request]) -> dict[str, Answer]:
    """Answers of one server to all requests at once, the first that it is asked."""
    return feather_server.answers(requests)
