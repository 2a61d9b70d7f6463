"""Servers and reference answers for the tests of this folder; each server is started once and used by several tests."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from feather_sglang.policy_names import SWITCH_PATH
from server.cases import CASES, KEY, ROOMY, FeatherServer
from server.sglang_server import SGLangServer
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
def fcfs(model: Path, logs: Path, requests: list[Request]) -> list[dict[str, Answer]]:
    """Answers under fcfs: of all requests at once, and of the same requests, last first, eight at a time."""
    with SGLangServer(model, logs / "fcfs.txt", "--schedule-policy", "fcfs", *ROOMY) as server:
        return [stream_all(server.url, requests), stream_all(server.url, requests[::-1], concurrency=8)]


@pytest.fixture(scope="session")
def handed_on() -> Iterator[dict[str, SGLangServer]]:
    """The servers of cases that another case goes on with."""
    servers: dict[str, SGLangServer] = {}
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="module")
def feather_server(
    request: pytest.FixtureRequest, model: Path, logs: Path, fcfs: object, handed_on: dict[str, SGLangServer]
) -> Iterator[FeatherServer]:
    """The server of one case; after every scheduling step it checks its tree against SGLang's queues."""
    name, case = request.param, CASES[request.param]
    server = handed_on.pop(case.after or name, None) or _start(case.after or name, model, logs)
    try:
        printed = 0
        if case.after is not None:
            server.wait_until_idle()
            server.post("/flush_cache", {})
            printed = len(server.text())
            server.post(SWITCH_PATH, {"schedule_policy": case.policy})
        yield FeatherServer(case, server, printed)
    finally:
        if any(other.after == name for other in CASES.values()):
            handed_on[name] = server
        else:
            server.stop()


def _start(name: str, model: Path, logs: Path) -> SGLangServer:
    case = CASES[name]
    flags = ("--schedule-policy", case.policy, *case.flags)
    environment = {"FEATHER_DEBUG_CHECK": "1", **case.environment}
    key = KEY if KEY in case.flags else None
    return SGLangServer(model, logs / f"{name}.txt", *flags, key=key, serve=case.serve, **environment).__enter__()


@pytest.fixture(scope="module")
def served(feather_server: FeatherServer, requests: list[Request]) -> dict[str, Answer]:
    """Answers of one server to all requests at once, the first that it is asked."""
    return feather_server.answers(requests)
