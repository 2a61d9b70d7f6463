"""Two ranks decode what SGLang's own backend does, with batches of their own or with a part of each request's heads."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from effort import FULL, on_newest
from feather_sglang.adapter.ports import free_port
from preloaded import Preloaded

RANKS = (0, 1)
COMPARED = {  # servers of `attention_ranks` under pat, and what they are compared with
    "pat": "stock",
    "pat under feather, overlapped": "stock",
}
if FULL or on_newest():
    COMPARED |= {
        "latent, pat under feather, overlapped": "latent, stock",
        "latent heads shared out, pat": "latent heads shared out, stock",
    }
SERVERS = (*dict.fromkeys(COMPARED.values()), *COMPARED)


def run_ranks(folder, preloaded):
    """Both ranks in processes of their own, which write what they find; those that wait for good are killed."""
    folder.mkdir()
    ports = {name: free_port() for name in SERVERS}
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    processes = []
    for rank in RANKS:
        code = (
            f"import sys; sys.path[:0] = {path!r}\n"
            "from feather_sglang.adapter import cpu_shims; cpu_shims.install()\n"
            f"import attention_ranks; attention_ranks.serve({rank}, {str(folder)!r}, {ports})"
        )
        with open(os.devnull) as nothing, open(folder / f"log-{rank}.txt", "w+") as log:
            processes.append(preloaded.python(["-c", code], os.environ, (nothing, log, log)))
    try:
        deadline = time.monotonic() + 180
        while not all([process.poll() for process in processes]) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:  # ranks that do not decide alike wait for each other for good
        for process in processes:
            if not process.poll():
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def found(tmp_path_factory, preloaded: Preloaded):
    """By server, what each rank has found."""
    folder = tmp_path_factory.mktemp("ranks") / "first"
    run_ranks(folder, preloaded)
    if not any((folder / f"{SERVERS[0]}-{rank}.json").exists() for rank in RANKS):
        # Not even SGLang alone came up: somebody else has taken a port since it was found free.
        folder = folder.with_name("second")
        run_ranks(folder, preloaded)
    results = {}
    for name in SERVERS:
        for rank in RANKS:
            file = folder / f"{name}-{rank}.json"
            logs = [(folder / f"log-{one}.txt").read_text()[-2000:] for one in RANKS]
            assert file.exists(), "\n".join(logs)
            results.setdefault(name, []).append(json.loads(file.read_text()))
    return results


@pytest.mark.parametrize("name", COMPARED)
def test_the_tokens_of_sglangs_own_backend_on_each_rank(found, name):
    for rank, stock, one in zip(RANKS, found[COMPARED[name]], found[name], strict=True):
        assert one["tokens"] == stock["tokens"], rank
        assert len({tuple(tokens) for tokens in one["tokens"].values()}) > 10
        assert {"DECODE", "EXTEND"} <= set(one["modes"])
        assert ("IDLE" in one["modes"]) == ("shared out" not in name)


@pytest.mark.parametrize("name", COMPARED)
def test_each_rank_reads_shared_tokens_once_and_counts_for_itself(found, name):
    read = [one["read"] for one in found[name]]
    if "shared out" in name:  # one batch, which the first rank counts
        read.pop()
    assert all(0 < one["read"] < 0.5 * one["attended"] for one in found[name][: len(read)])
    assert len(set(read)) == len(read)
