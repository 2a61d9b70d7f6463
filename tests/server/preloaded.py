"""Starts servers from a process that has imported SGLang already: a server is three processes, nine seconds each.

Run as a program this file is that process. For every line that it reads it forks, and the child becomes
``python -m sglang.launch_server`` with that line's flags and environment. It forks before anything but imports has
happened, and so do the processes that SGLang then spawns: each takes one that stands by, and runs in it what it would
have handed to a new Python, pickled as ever. So a plugin finds what it finds in processes of their own, whose imports
alone came from elsewhere. (Servers that start as a user starts them: the one of ``sglang serve``, those of
test_start_up.py, and ``sglang.Engine``.)
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

STAND_BY = 4  # processes that one server may spawn: a scheduler per rank and the detokenizer
HIGH = 300  # above the numbers of files that are handed over


class Preloaded:
    """The process to fork from, seen from the tests; it ends when it is closed, the servers do not."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def launch(self, flags: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """A server in a session of its own, with its output in a file."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(flags), dict(environment), str(log)]) + "\n")
        self._process.stdin.flush()
        pid = self._process.stdout.readline()
        assert pid, "the process that has imported SGLang has ended: what it printed is above"
        return Forked(int(pid))

    def close(self) -> None:
        self._process.communicate()


class Forked:
    """What of ``subprocess.Popen`` a server's tests use, for a process that is somebody else's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> str | None:
        """Whether it has ended; its status is not known."""
        return "some status" if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self) -> None:
        select.select([self._descriptor], [], [])
        os.close(self._descriptor)


# What follows runs in the preloaded process and in its children ---------------------------------------------------


def main() -> None:
    sys.path[0] = os.getcwd()  # as ``python -m`` has it

    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  imports every model

    gc.collect()
    gc.freeze()  # or the collector writes to every page that the children share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        flags, environment, log = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        with open(os.devnull) as nothing, open(log, "wb") as output:
            for number, file in enumerate((nothing, output, output)):
                os.dup2(file.fileno(), number)
        adopt(environment)
        spawn_in(stand_by(STAND_BY))
        sys.argv = ["launch_server.py", *flags]
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        return


def adopt(environment: Mapping[str, str]) -> None:
    """Take an environment for one's own, with what SGLang reads from it while it is imported."""
    from sglang.srt.managers import schedule_policy

    os.environ.clear()
    os.environ.update(environment)
    schedule_policy.CLIP_MAX_NEW_TOKENS = int(os.environ.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4096"))


def stand_by(count: int) -> list[tuple[int, socket.socket]]:
    """Children that wait for what to run, each with a socket to tell it; who is not told ends with its parent."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    children = []
    for mine, its in pairs:
        if pid := os.fork():
            children.append((pid, mine))
            continue
        for pair in pairs:
            for end in pair:
                if end is not its:
                    end.close()
        run_what_is_told(its)
    for _, its in pairs:
        its.close()
    return children


def run_what_is_told(told: socket.socket) -> None:
    message, files, *_ = socket.recv_fds(told, 1 << 20, 64)
    told.close()
    if not message:
        os._exit(0)
    work: dict[str, Any] = json.loads(message)
    adopt(work["environment"])
    above = [os.dup2(file, HIGH + index) for index, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(above, work["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["-c", *work["arguments"]]
    exec(work["program"], {"__name__": "__main__"})  # it ends with sys.exit
    os._exit(1)


def spawn_in(children: list[tuple[int, socket.socket]]) -> None:
    """Have multiprocessing take one of those who stand by instead of a new Python."""
    new_python = util.spawnv_passfds

    def spawn(path: bytes, command: Sequence[str], files: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in command:
            return new_python(path, command, files)
        pid, tell = children.pop(0)
        files = sorted(set(files))
        code = command.index("-c") + 1
        work = {"program": command[code], "arguments": command[code + 1 :], "files": files}
        socket.send_fds(tell, [json.dumps(work | {"environment": dict(os.environ)}).encode()], files)
        tell.close()
        return pid

    util.spawnv_passfds = spawn


if __name__ == "__main__":
    main()
