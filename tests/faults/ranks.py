"""Two of SGLang's schedulers over gloo whose clocks differ, for thousands of rounds: they form the same batches.

    python tests/faults/ranks.py [--rounds 10000]

Each rank is a process with a scheduler of its own and the same requests. Its clock, and so all that it measures, is
its own. Neither runs the model: batches that differ would hang there, here they are told.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "sglang"), str(Path(__file__).resolve().parents[1])]

OPTIONS = {"tbt": 40, "max_wait": 20, "seed": 3}


def serve(rank: int, folder: str, port: int, rounds: int) -> None:
    """One rank; writes a digest of its batches into the folder."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "FEATHER_OPTIONS": json.dumps(OPTIONS), "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
    }  # fmt: skip
    import sglang.srt.managers.scheduler as sglang_scheduler
    from harness import CONFIG, Server
    from sglang.srt import server_args

    server_args.wait_port_available = lambda *_, **__: True

    def start(server: Any, args: Any, ports: Any) -> Any:
        ranks = sglang_scheduler.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
        sglang_scheduler.publish(args, role="scheduler", ranks=ranks)
        return sglang_scheduler.Scheduler(args, ports)

    own = Path(folder, str(rank))
    own.mkdir()
    kind = type("Rank", (Server,), {"start": start})
    config = {**CONFIG, "num_attention_heads": 2, "num_key_value_heads": 2}
    one = kind(own, "feather", paced=True, config=config, tp_size=2, nccl_port=port, max_running_requests=12,
               max_total_tokens=4096, chunked_prefill_size=256)  # fmt: skip
    scheduler, feather, clock, stream = one.scheduler, one.feather, random.Random(f"clock {rank}"), random.Random(7)
    now = [1000.0 * rank]

    def tick() -> float:
        now[0] += clock.random() * (0.02 + 0.05 * rank)
        return now[0]

    feather.clock = tick
    digest, batches = hashlib.sha256(), 0
    for number in range(rounds):
        if len(scheduler.waiting_queue) < 30:
            for _ in range(stream.choice((0, 0, 1, 2))):
                name, group = f"r{len(one.requests):07}", stream.randrange(6)
                tokens = [2 + group] * stream.choice((60, 200, 400)) + [stream.randrange(20, 400)] * 3
                one.submit(name, tokens, max_new_tokens=stream.randrange(1, 12))
        if stream.random() < 0.02 and scheduler.waiting_queue:
            one.abort(scheduler.waiting_queue[stream.randrange(len(scheduler.waiting_queue))].rid)
        batch = one.step()
        if batch is not None:
            batches += 1
            digest.update(f"{number} {batch.forward_mode.name} {[req.rid for req in batch.reqs]}\n".encode())
        if number % 100 == 0:  # what has finished is of no use to the test
            one.requests = dict(list(one.requests.items())[-200:])
    stats = feather.stats()
    told = {"digest": digest.hexdigest(), "batches": batches, "rounds": stats["rounds"], "failed": feather.failed,
            "stops": stats["stops"], "delayed": stats["delayed_rounds"], "decoded_first": stats["decoded_first"],
            "own": feather.meters.decode.step_seconds}  # fmt: skip
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier(scheduler.tp_cpu_group)
    os._exit(0)  # or each waits for the other's groups


def run(rounds: int, patience: float) -> list[dict[str, Any]]:
    """Serve on both ranks; raises ``AssertionError`` where one does not end in time, or fails."""
    from feather_sglang.adapter import cpu_shims

    cpu_shims.install()
    import harness  # noqa: F401  imports SGLang, once for both

    from feather_sglang.adapter.ports import free_port

    with tempfile.TemporaryDirectory() as folder:
        port, fork = free_port(), multiprocessing.get_context("fork")
        ranks = [fork.Process(target=serve, args=(rank, folder, port, rounds)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + patience
        try:
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
                assert rank.exitcode is not None, f"the ranks wait for each other after {patience:.0f} s"
                assert rank.exitcode == 0, f"a rank ended with status {rank.exitcode}"
        finally:
            for rank in ranks:
                rank.kill()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def check(told: list[dict[str, Any]], rounds: int) -> None:
    """What must hold of two ranks."""
    first, second = told
    assert first["digest"] == second["digest"], f"the ranks' batches differ: {told}"
    assert not first["failed"] and not second["failed"]
    assert first["batches"] == second["batches"] > rounds / 2 and first["rounds"] > rounds / 10
    assert first["own"] != second["own"], "the ranks measured the same"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000, help="(%(default)s)")
    rounds = parser.parse_args(arguments).rounds
    begun = time.monotonic()
    try:
        told = run(rounds, 600 + rounds)
        check(told, rounds)
    except AssertionError as error:
        print(f"ranks: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - begun
    print(f"{rounds} rounds of two ranks, the same {told[0]['batches']} batches, {seconds:.0f} s: {told[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
