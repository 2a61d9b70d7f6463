"""A replay that is told to end: the shell's status, one line, and no process or file of its left behind."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from effort import full_only, newest_is_enough

# How a command ends does not depend on the release, but for what importing SGLang does to signals: one shows that.
# tests/unit/test_ab_ends.py has all signals, on a command that imports nothing.
WORK = ["--policies", "fcfs,lpm", "--requests", "20000", "--prefix-tokens", "400", "--output-tokens", "400"]
PATIENCE = 120  # seconds in which a slow machine has imported SGLang
AT_ONCE = 5  # seconds, of such a machine; importing SGLang, or taking down what was imported, takes it longer


def processes(mark):
    """Those that have the mark in their environment, which children inherit."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, 143, "feather: ended by SIGTERM\n"),
        pytest.param(signal.SIGHUP, 129, "feather: ended by SIGHUP\n", marks=full_only),
        pytest.param(signal.SIGINT, 130, "feather: interrupted\n", marks=full_only),
    ],
    ids=["SIGTERM", "SIGHUP", "SIGINT"],
)
def test_a_signal_ends_the_command_and_its_replays(number, status, line, tmp_path):
    mark = secrets.token_hex(16)
    command = [sys.executable, "-m", "feather_sglang.cli", "ab", *WORK, "--out", str(tmp_path / "out")]
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the sockets of processes
        process = subprocess.Popen(
            command,
            # PyTorch's own cache is for all processes to come, and begins under TMPDIR on import.
            env={
                **os.environ,
                "TMPDIR": folder,
                "REPLAY_MARK": mark,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGINT, signal.SIGHUP)],
        )
        deadline = time.monotonic() + PATIENCE
        while len(processes(mark)) < 5:  # the command, who minds its semaphores, who forks, and two replays
            assert process.poll() is None and time.monotonic() < deadline, processes(mark)
            time.sleep(0.1)
        process.send_signal(number)
        said = process.communicate(timeout=PATIENCE)[1]
        assert (process.returncode, said) == (status, line)
        deadline = time.monotonic() + AT_ONCE
        while left := processes(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        assert os.listdir(folder) == []


@newest_is_enough
@pytest.mark.parametrize(
    ("number", "status", "line"),
    [(signal.SIGINT, 130, "feather: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
    ids=["SIGINT", "SIGKILL"],
)
def test_what_comes_while_it_starts_ends_it_at_once(number, status, line, tmp_path):
    """A terminal tells all processes of Ctrl-C, and what replays are forked from imports SGLang for seconds."""
    mark = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-m", "feather_sglang.cli", "ab", *WORK, "--out", str(tmp_path / "out")],
        env={**os.environ, "REPLAY_MARK": mark, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    while len(processes(mark)) < 3:  # the command, who minds its semaphores, who forks
        assert process.poll() is None and time.monotonic() < deadline, processes(mark)
        time.sleep(0.01)
    time.sleep(0.5)
    deadline = time.monotonic() + AT_ONCE
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.kill()
    said = process.communicate(timeout=PATIENCE)[1]
    assert (process.returncode, said) == (status, line)
    while left := processes(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@newest_is_enough
def test_nothing_is_left_of_a_command_that_ends_by_itself_and_it_complains_of_nothing(tmp_path):
    mark = secrets.token_hex(16)
    work = ["--policies", "fcfs", "--requests", "20", "--prefix-tokens", "100", "--output-tokens", "4"]
    command = [sys.executable, "-m", "feather_sglang.cli", "ab", *work, "--out", str(tmp_path / "out")]
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the sockets of processes
        environment = {**os.environ, "TMPDIR": folder, "REPLAY_MARK": mark}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        # Both ends of its output are closed: the process that replays start from has ended as well.
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [path for path in Path(folder).iterdir() if not path.is_dir()] == []
    deadline = time.monotonic() + AT_ONCE
    while left := processes(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
