"""Faults of a server, made on purpose, and a count of the answers to each request."""

from __future__ import annotations

import importlib.util
import random
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs an installed SGLang", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))  # for its harness

from feather_sglang.adapter import cpu_shims

cpu_shims.install()


@pytest.fixture(autouse=True)
def known_hash_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server draws in secret is the same in every run."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


class Answers(Counter[str]):
    """Counts how often each request was reported to its client as finished."""

    def install(self, scheduler: Any) -> None:
        def stream_output(streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
            for req in reqs:
                if req.finished() and not req.finished_output:
                    req.finished_output = True  # as SGLang's own streamer notes it
                    self[req.rid] += 1

        type(scheduler.output_streamer).stream_output = stream_output
        tell = type(scheduler).send_abort_output

        def send_abort_output(message: Any, req: Any) -> Any:
            self[req.rid] += 1
            return tell(scheduler, message, req)

        scheduler.send_abort_output = send_abort_output


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes real schedulers with ``answers``, under feather unless told otherwise."""
    from harness import Server

    made = []

    def make(policy: str = "feather", **overrides: Any) -> Any:
        one = Server(tmp_path, policy, **overrides)
        one.answers = Answers()
        one.answers.install(one.scheduler)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
