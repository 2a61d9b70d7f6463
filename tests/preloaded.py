"""A Python that has imported SGLang already: each process that imports it for itself takes nine seconds.

`Preloaded.start` starts the process that imports it. For whoever asks, it forks, and the child does what ``python``
would with the same arguments, environment and files: nothing but imports has happened before. Run as a program
(``python preloaded.py ADDRESS -c CODE``), this file is such a Python; the processes in which pytest-xdist runs tests
are (conftest.py). So are most servers; and where a server spawns processes, each takes one that stands by, forked from
the same state, and runs in it what it would have handed to a new Python, pickled as ever. So a plugin finds what it
finds in processes of their own, whose imports alone came from elsewhere. The process that replays are forked from is
such a one too. Started as users start them are the server of ``sglang serve``, that of tests/server/test_start_up.py
and the commands of tests/sglang/test_replay_ends.py.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import secrets
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import IO, Any

STAND_BY = 4  # processes that one server may spawn: a scheduler per rank and the detokenizer
FORK_SERVER = "from multiprocessing.forkserver import main"  # how the code begins that replays are forked from
HIGH = 300  # above the numbers of files that are handed over
LONGEST = 1 << 20  # bytes of a message: an environment, above all
ADDRESS = "FEATHER_TEST_PRELOADED"  # the variable that tells the tests' processes of the one that is there


class Preloaded:
    """The process to fork from, as its clients see it; it ends with the process that started it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> Preloaded:
        """Import SGLang with these variables set."""
        made = cls(f"preloaded-{os.getpid()}-{secrets.token_hex(4)}")
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", made.address]
        with tempfile.TemporaryFile("w+") as errors:
            made._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
            assert made._process.stdout is not None
            if not made._process.stdout.readline():
                errors.seek(0)
                raise AssertionError(f"SGLang could not be imported:\n{errors.read()[-4000:]}")
        return made

    def python(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[IO[Any]],
        own_session: bool = False,
    ) -> Forked:
        """``python -m MODULE ...`` or ``python -c CODE ...``, with these for standard input, output and errors."""
        wanted = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "own_session": own_session,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
            asked.connect(f"\0{self.address}")  # no file: a name that goes with its process
            socket.send_fds(asked, [json.dumps(wanted).encode()], [file.fileno() for file in files])
            pid = asked.recv(100)
        assert pid, "the process that has imported SGLang has ended"
        return Forked(int(pid))

    def run(self, code: str, environment: Mapping[str, str]) -> tuple[str, str]:
        """What a program prints, and what it prints as errors."""
        return self.printed(["-c", code], environment)

    def printed(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
        """The same of ``python ARGUMENTS``."""
        with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            self.python(arguments, environment, (nothing, out, errors)).wait()
            out.seek(0)
            errors.seek(0)
            return out.read(), errors.read()

    def run_file(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
        """What ``python FILE ...`` prints, and what it prints as errors."""
        code = f"import runpy, sys; sys.argv = {list(arguments)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
        return self.run(code, environment)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


class Forked:
    """The part of ``subprocess.Popen`` that tests use, for a process that is another process's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._ended = select.poll()  # not select.select: the tests' processes may have a thousand files open
        self._ended.register(self._descriptor, select.POLLIN)

    def poll(self) -> str | None:
        """Whether it has ended; its status is not known."""
        return "some status" if self._ended.poll(0) else None

    def wait(self) -> None:
        self._ended.poll()
        os.close(self._descriptor)


# What follows runs in the preloaded process and in its children ---------------------------------------------------


def serve(address: str) -> None:
    """Fork for whoever asks, until standard input ends; returns in each child once it has been what it is to be."""
    import sglang.srt.dllm.algorithm
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  imports every model

    gc.collect()
    gc.freeze()  # or the collector writes to every page that the children share
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen()
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        asked, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):  # nobody asks how they ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        message, files, *_ = socket.recv_fds(asked, LONGEST, 3)
        if pid := os.fork():
            asked.send(str(pid).encode())
            asked.close()
            for file in files:
                os.close(file)
            continue
        asked.close()
        listener.close()
        be_python(json.loads(message), files)
        return


def be_python(wanted: dict[str, Any], files: Sequence[int]) -> None:
    if wanted["own_session"]:
        os.setsid()
    take(files, range(3))
    os.chdir(wanted["folder"])
    adopt(wanted["environment"])
    kind, what, *arguments = wanted["arguments"]
    if kind == "-c":
        spawn_in(stand_by(2))
        sys.path[0] = ""
        sys.argv = ["-c", *arguments]
        exec(what, {"__name__": "__main__"})
        return
    atexit.unregister(leave)  # a server's processes look at each other's status
    atexit.register(gc.unfreeze)  # or nanobind reports what lies there as leaked
    sys.path[0] = os.getcwd()
    spawn_in(stand_by(STAND_BY))
    sys.argv = [what, *arguments]
    runpy.run_module(what, run_name="__main__", alter_sys=True)


def leave() -> None:
    """End without taking down what was imported, which takes a second or two."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(0)


def take(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files the numbers that a program expects them to have."""
    above = [os.dup2(file, HIGH + index) for index, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def adopt(environment: Mapping[str, str]) -> None:
    """Take an environment for one's own, with what is read from it before a program begins or imports SGLang."""
    from sglang.srt.managers import schedule_policy

    os.environ.clear()
    os.environ.update(environment)
    schedule_policy.CLIP_MAX_NEW_TOKENS = int(os.environ.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4096"))
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in more if path and path not in sys.path]


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
    message, files, *_ = socket.recv_fds(told, LONGEST, 64)
    told.close()
    if not message:
        os._exit(0)
    work = json.loads(message)
    adopt(work["environment"])
    take(files, work["files"])
    sys.argv = ["-c", *work["arguments"]]
    exec(work["program"], {"__name__": "__main__"})  # it ends with sys.exit
    os._exit(1)


def spawn_in(children: list[tuple[int, socket.socket]]) -> None:
    """Have multiprocessing take one of those who stand by instead of a new Python, where it would import SGLang."""
    new_python = util.spawnv_passfds

    def spawn(path: bytes, command: Sequence[str], files: Sequence[int]) -> int:
        code = command.index("-c") + 1
        if not children or ("--multiprocessing-fork" not in command and not command[code].startswith(FORK_SERVER)):
            return new_python(path, command, files)
        pid, tell = children.pop(0)
        files = sorted({0, 1, 2, *files})
        work = {"program": command[code], "arguments": command[code + 1 :], "files": files}
        socket.send_fds(tell, [json.dumps(work | {"environment": dict(os.environ)}).encode()], files)
        tell.close()
        return pid

    util.spawnv_passfds = spawn


def main() -> None:
    """Be the preloaded process, or one that it is asked for."""
    if sys.argv[1] == "--serve":
        atexit.register(leave)  # before SGLang registers anything: what is registered first runs last
        serve(sys.argv[2])
        return
    address, *arguments = (word for word in sys.argv[1:] if word != "-u")
    Preloaded(address).python(arguments, os.environ, (sys.stdin, sys.stdout, sys.stderr)).wait()


if __name__ == "__main__":
    main()
