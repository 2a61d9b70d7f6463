"""A rank of two on a CPU, for a process of its own: `serve` runs servers, one after another.

They have data-parallel attention, or share one batch and its heads (tensor parallelism).

SGLang's collective operations are for GPUs here and there: those are done by gloo, and pinned memory is ordinary. All
else is its own: ranks agree on every step, pad to the longest batch, and run an idle one where they have no request.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plain_attention
import pytest
import sglang.srt.managers.scheduler as sglang_scheduler
import torch
import torch.distributed as dist
import unpinned
from harness import CONFIG, OverlapServer, Server, runner_of, spread_weights
from sglang.srt import server_args
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from test_model_kinds import KINDS
from test_model_kinds import spread_weights as spread_latent_weights

from feather_sglang.adapter.attention.metrics import pat_metrics

MODEL = {**CONFIG, "num_hidden_layers": 2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
STEPS = 100
# Two heads a rank under tensor parallelism, four under data-parallel attention.
LATENT = {**KINDS["latent"].config, "num_hidden_layers": 2, "first_k_dense_replace": 2}
PARALLEL_ATTENTION = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}


class Served(NamedTuple):
    """A server: the scheduler's order of steps, its policy, what decodes, the model and how ranks share it."""

    kind: type[Server] = Server
    policy: str = "fcfs"
    backend: str | None = None
    model: dict[str, Any] = MODEL
    flags: dict[str, Any] = PARALLEL_ATTENTION
    rounds: int = STEPS


_LATENT, _TENSORS = Served(model=LATENT, rounds=85), Served(model=LATENT, flags={"tp_size": 2}, rounds=40)
SERVERS = {
    "stock": Served(),
    "pat": Served(backend="pat"),
    "pat under feather, overlapped": Served(OverlapServer, "feather", "pat"),
    "latent, stock": _LATENT,
    "latent, pat under feather, overlapped": _LATENT._replace(kind=OverlapServer, policy="feather", backend="pat"),
    "latent heads shared out, stock": _TENSORS,
    "latent heads shared out, pat": _TENSORS._replace(backend="pat"),
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
        dp_rank = rank if args.enable_dp_attention else None
        scheduler = sglang_scheduler
        if "gpu_id" in inspect.signature(scheduler.Scheduler.__init__).parameters:
            scheduler.publish(args, role="scheduler")
            return scheduler.Scheduler(args, ports, rank, rank, 0, 0, 0, 0, dp_rank)
        ranks = scheduler.SpawnRanks(world_rank=rank, dp_rank=dp_rank, gpu_id=rank)
        scheduler.publish(args, role="scheduler", ranks=ranks)
        return scheduler.Scheduler(args, ports)

    return type(kind.__name__, (kind,), {"start": start})


def steps(server, rank, rounds):
    """Requests that come to one rank, to the other, and to both; returns the mode of every step."""
    modes = []
    prefix = np.random.default_rng(0).integers(2, 500, 130).tolist()
    for step in range(rounds):
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
    """Run servers, at ports by name, as this rank; what came of each goes into the folder."""
    torch.set_num_threads(1)
    # Else SGLang wants a NUMA node for each rank.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"{min(os.sched_getaffinity(0))}|{max(os.sched_getaffinity(0))}"
    os.environ |= {"FEATHER_PAT_REFERENCE": "1", "FEATHER_DEBUG_CHECK": "1", "TORCHDYNAMO_DISABLE": "1"}
    own = Path(folder, str(rank))
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        for name, port in ports.items():
            served = SERVERS[name]
            before, flags = tokens_read(), {**served.flags, "nccl_port": port}
            latent = served.model is LATENT
            if latent:
                plain_attention.install(patch)
                flags["attention_backend"] = plain_attention.STAND_IN
            make = of_rank(served.kind, rank)
            one = make(own, served.policy, config=served.model, decode_attention_backend=served.backend, **flags)
            spread_latent_weights(runner_of(one).model) if latent else spread_weights(one)
            parallel = "dp_size" in served.flags  # else both have the same batch, and the same requests
            modes = steps(one, rank if parallel else 0, served.rounds)
            if hasattr(one.scheduler, "feather"):
                assert not one.feather.failed and one.feather.admission.state.fairness.round > 0
            one.assert_pools_full()
            attended, read = tokens_read() - before
            found = {"tokens": one.outputs(), "modes": modes, "attended": attended, "read": read}
            Path(folder, f"{name}-{rank}.json").write_text(json.dumps(found))
            one.close()


def tokens_read():
    """Zeros on a rank that leaves counting to the first."""
    metrics = pat_metrics()
    return np.array([metrics.attended._value.get(), metrics.read._value.get()] if metrics else [0.0, 0.0])
