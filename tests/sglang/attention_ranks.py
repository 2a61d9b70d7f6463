"""A rank of data-parallel attention on a CPU, for a process of its own: `serve` runs servers, one after another.

SGLang's collective operations are for GPUs here and there: those are done by gloo, and pinned memory is ordinary. All
else is its own: ranks agree on every step, pad to the longest batch, and run an idle one where they have no request.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import numpy as np
import pytest
import sglang.srt.managers.scheduler as sglang_scheduler
import torch
import torch.distributed as dist
import unpinned
from harness import CONFIG, OverlapServer, Server, spread_weights
from sglang.srt import server_args
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from feather_sglang.adapter.attention.metrics import pat_metrics

MODEL = {**CONFIG, "num_hidden_layers": 2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
STEPS = 100
SERVERS = {  # by name: the scheduler's order of steps, its policy, what decodes
    "stock": (Server, "fcfs", None),
    "pat": (Server, "fcfs", "pat"),
    "pat under feather, overlapped": (OverlapServer, "feather", "pat"),
}


def install(patch):
    """Put gloo where SGLang uses what a CPU has not (``patch``: a ``MonkeyPatch``)."""

    def gather(group, output, own):
        dist.all_gather(list(output.chunk(group.world_size)), own, group=group.device_group)

    def scatter(group, output, own):
        dist.all_reduce(own, group=group.device_group)
        output.copy_(own.chunk(group.world_size)[group.rank_in_group])
        return output

    def copy(target, source, dim, offset, count, from_offset):
        first, last = int(offset), int(offset) + int(count)
        if from_offset:
            target[: last - first].copy_(source[first:last])
        else:
            target[first:last].copy_(source[: last - first])

    unpinned.install(patch)
    # Else the second rank waits for the port of the ranks' own meeting, which the first has taken by then.
    patch.setattr(server_args, "wait_port_available", lambda *_, **__: True)
    patch.setattr(GroupCoordinator, "all_gather_into_tensor", gather)
    patch.setattr(GroupCoordinator, "reduce_scatter_tensor", scatter)
    patch.setattr(dp_attention, "memcpy_func" if hasattr(dp_attention, "memcpy_func") else "memcpy_triton", copy)
    patch.setattr(TorchNativeAttnBackend, "get_cuda_graph_seq_len_fill_value", lambda backend: 1)


def of_rank(kind, rank):
    """That kind of server as one of several ranks."""

    def start(server, args, ports):
        scheduler = sglang_scheduler
        if "gpu_id" in inspect.signature(scheduler.Scheduler.__init__).parameters:
            scheduler.publish(args, role="scheduler")
            return scheduler.Scheduler(args, ports, rank, rank, 0, 0, 0, 0, rank)
        ranks = scheduler.SpawnRanks(world_rank=rank, dp_rank=rank, gpu_id=rank)
        scheduler.publish(args, role="scheduler", ranks=ranks)
        return scheduler.Scheduler(args, ports)

    return type(kind.__name__, (kind,), {"start": start})


def steps(server, rank):
    """Requests that come to one rank, to the other, and to both; returns the mode of every step."""
    modes = []
    prefix = np.random.default_rng(0).integers(2, 500, 130).tolist()
    for step in range(STEPS):
        if step < 10 if rank == 0 else 20 <= step < 26 or step in (50, 53, 54):
            for number in range(2):
                own = np.random.default_rng([step, number]).integers(2, 500, 5 + step % 7).tolist()
                server.submit(f"r{step}-{number}", prefix + own, max_new_tokens=8 + step % 5)
        if rank == 0 and step == 52:
            server.submit("late", prefix[:100], max_new_tokens=20)
        batch = server.step()
        modes.append(None if batch is None else batch.forward_mode.name)
    return modes


def serve(rank, folder, ports):
    """Run all servers as this rank; writes what came of each into the folder, under its name and the rank."""
    torch.set_num_threads(1)
    # Else SGLang wants a NUMA node for each rank.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"{min(os.sched_getaffinity(0))}|{max(os.sched_getaffinity(0))}"
    os.environ |= {"FEATHER_PAT_REFERENCE": "1", "FEATHER_DEBUG_CHECK": "1", "TORCHDYNAMO_DISABLE": "1"}
    own = Path(folder, str(rank))
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        for (name, (kind, policy, backend)), port in zip(SERVERS.items(), ports, strict=True):
            before = tokens_read()
            flags = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "nccl_port": port}
            one = of_rank(kind, rank)(own, policy, config=MODEL, decode_attention_backend=backend, **flags)
            spread_weights(one)
            modes = steps(one, rank)
            if hasattr(one.scheduler, "feather"):
                assert not one.feather.failed and one.feather.admission.state.fairness.round > 0
            one.assert_pools_full()
            attended, read = tokens_read() - before
            found = {"tokens": one.outputs(), "modes": modes, "attended": attended, "read": read}
            Path(folder, f"{name}-{rank}.json").write_text(json.dumps(found))
            one.close()


def tokens_read():
    metrics = pat_metrics()
    return np.array([metrics.attended._value.get(), metrics.read._value.get()])
