"""``feather ab --engine server`` as a process: how it ends, and what it leaves behind."""

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from feather_sglang import ending

ROOT = Path(__file__).parents[2]
SMALL = ["--prefix-tokens", "40", "--output-tokens", "8", "--groups", "2", "--policies", "fcfs", "--rate"]
PATIENCE = 300  # seconds to wait for a run that ends by itself, however slow the machine


def as_from_a_terminal(ignored=(), files=None):
    """In the child: signals end it, but for the ignored ones; so many files may be open."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)


class Run:
    """The command in a process of its own, its servers being ``tests/data/fake_server``."""

    def __init__(self, folder, *flags, **terminal):
        (folder / "config.json").write_text('{"vocab_size": 300}')
        self.folder, self.pids = folder, [folder / "server.pid"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/data/fake_server"), str(ROOT), str(ROOT / "kernels")]),
            "FAKE_PID": str(self.pids[0]),
        }
        command = [sys.executable, "-m", "feather_sglang.cli", "ab", "--engine", "server", "--model", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--out", str(folder / "out"), *SMALL, *flags],
            env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: as_from_a_terminal(**terminal),
        )  # fmt: skip

    def await_load(self):
        """Return once the server answers requests and the clocks are read."""
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text().strip() for file in self.pids):
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()[0]
            time.sleep(0.05)

    def left(self):
        """Whether the server, or who reads the clocks, is alive some time later."""
        deadline = time.monotonic() + 10
        while alive := [file.name for file in self.pids if is_alive(int(file.read_text()))]:
            if time.monotonic() > deadline:
                return alive
            time.sleep(0.05)
        return []


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_signal_ends_it_and_its_server(number, status, tmp_path):
    run = Run(tmp_path, "20", "--requests", "1000")
    run.await_load()
    run.process.send_signal(number)
    said = run.process.communicate(timeout=30)[0]
    assert run.process.returncode == status, said
    assert run.left() == [] and "Traceback" not in said


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS = pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, SystemExit(143)), (signal.SIGHUP, SystemExit(129)), (signal.SIGINT, KeyboardInterrupt())],
    ids=["SIGTERM", "SIGHUP", "SIGINT"],
)


@pytest.fixture
def from_a_terminal():
    """No signal is ignored, and the event loop is asyncio's own: SGLang, once a test has imported it, sets uvloop's."""
    policy = asyncio.get_event_loop_policy()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(policy)
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupted:
    """A turn of the event loop; the signal comes after the loop has taken it up and before it is run."""

    def __init__(self, turn, number):
        self._turn, self._number = turn, number

    @property
    def _cancelled(self):
        signal.raise_signal(self._number)
        return False

    def _run(self):
        self._turn._run()


@ENDS
@pytest.mark.usefixtures("from_a_terminal")
@pytest.mark.timeout(60)  # a task whose turn is lost is waited for in vain
def test_a_signal_amid_an_event_loop_ends_all_its_tasks(number, raised):
    ended = []

    async def wait_for_it(task, event):
        try:
            await event.wait()
        finally:
            ended.append(task)

    async def main():
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        tasks = [loop.create_task(wait_for_it(task, event)) for task in range(3)]
        await asyncio.sleep(0.01)
        event.set()
        loop._ready[-1] = Interrupted(loop._ready[-1], number)  # the turn of the last task
        await asyncio.gather(*tasks)
        await asyncio.sleep(60)

    handlers = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(type(raised)) as caught, ending.on_signals():
        ending.run(main())
    assert caught.value.args == raised.args and sorted(ended) == [0, 1, 2]
    assert [signal.getsignal(number) for number in NUMBERS] == handlers


@ENDS
@pytest.mark.parametrize("when", ["made", "closed"])
@pytest.mark.usefixtures("from_a_terminal")
def test_a_signal_while_an_event_loop_is_made_or_closed(number, raised, when, monkeypatch):
    began, left, unraisable = [], [], []

    class Loop(asyncio.SelectorEventLoop):
        def _make_self_pipe(self):  # it would not have run: then its finalizer raises
            if when == "made":
                signal.raise_signal(number)
            super()._make_self_pipe()
            left.append("made")

        def _close_self_pipe(self):
            if when == "closed":
                signal.raise_signal(number)
            super()._close_self_pipe()
            left.append("closed")

    async def main():
        began.append(True)

    monkeypatch.setattr(asyncio.DefaultEventLoopPolicy, "_loop_factory", Loop)
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(type(raised)) as caught, ending.on_signals():
        ending.run(main())
    gc.collect()
    assert caught.value.args == raised.args and began == ([True] if when == "closed" else [])
    assert left == ["made", "closed"] and not unraisable


class Finalizer:
    """Is sent a signal while its finalizer runs, out of which no exception gets."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


@ENDS
@pytest.mark.usefixtures("from_a_terminal")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_during_a_finalizer_ends_it_all_the_same(number, raised):
    went_on = []

    async def amid_a_loop():
        Finalizer(number)
        await asyncio.sleep(10)
        went_on.append(number)

    with pytest.raises(type(raised)) as caught, ending.on_signals():
        ending.run(amid_a_loop())
    assert caught.value.args == raised.args
    with pytest.raises(type(raised)) as caught, ending.on_signals():
        Finalizer(number)
        ending.run(amid_a_loop())
    assert caught.value.args == raised.args and not went_on
    assert ending.run(asyncio.sleep(0, "nothing is told")) == "nothing is told"


@ENDS
@pytest.mark.usefixtures("from_a_terminal")
def test_a_signal_that_is_put_off_comes_at_the_end(number, raised):
    went_on = []
    with pytest.raises(type(raised)) as caught, ending.on_signals():
        with ending.put_off():
            signal.raise_signal(number)
            went_on.append("within")
        went_on.append("after")
    assert caught.value.args == raised.args and went_on == ["within"]


def test_in_another_thread_signals_do_what_they_did():
    before, during = [signal.getsignal(number) for number in NUMBERS], []

    def use():
        with ending.on_signals():
            during.extend(signal.getsignal(number) for number in NUMBERS)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert during == before


@pytest.mark.slow
def test_under_nohup_it_outlives_its_terminal(tmp_path):
    run = Run(tmp_path, "100", "--requests", "150", ignored=[signal.SIGHUP])
    run.await_load()
    run.process.send_signal(signal.SIGHUP)
    said = run.process.communicate(timeout=PATIENCE)[0]
    assert run.process.returncode == 0, said
    assert run.left() == []


def test_more_requests_at_a_time_than_files_may_be_open(tmp_path):
    run = Run(tmp_path, "100000", "--requests", "200", files=(64, 1024))
    said = run.process.communicate(timeout=PATIENCE)[0]
    (record,) = json.loads((tmp_path / "out" / "results.json").read_text())["records"]
    assert (run.process.returncode, record["counted"]["failed"]) == (0, 0), said


def test_requests_that_failed_are_a_status(tmp_path):
    run = Run(tmp_path, "500", "--requests", "200", files=(64, 64))
    said = run.process.communicate(timeout=PATIENCE)[0]
    assert run.process.returncode == 1 and "of 200 requests failed: OSError: [Errno 24]" in said, said


def test_an_slo_is_judged_at_each_rate_by_what_lone_requests_take(tmp_path):
    """A token of this server takes 50 ms, whatever the load: nobody waits, and nobody's tokens come within 1 ms."""
    flags = ["--requests", "20", "--rate-scale", "1,4", "--stream-interval", "1", "--slo"]
    for slo, share in (("ttft=1000x,tbt=3x", 1.0), ("tbt=1", 0.0)):
        folder = tmp_path / slo
        folder.mkdir()
        run = Run(folder, "40", *flags, slo)
        said = run.process.communicate(timeout=PATIENCE)[0]
        assert run.process.returncode == 0 and "measuring lone requests" in said and "95% up to" in said, said
        results = json.loads((folder / "out" / "results.json").read_text())
        low, high = results["rates"].values()
        assert high == pytest.approx(4 * low, rel=0.01) and results["slo"] == slo
        assert results["sustained"]["rates"]["fcfs"] == (high if share else None)
        assert list(results["runs"]) == ["fcfs @1x", "fcfs @4x"] == results["order"]
        for one in results["runs"].values():
            assert one["slo_share"] == share and one["goodput"] == pytest.approx(share * 20 / one["makespan"], rel=0.01)
            assert one["slowdown_p50"] > 0
