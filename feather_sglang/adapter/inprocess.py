"""The installed SGLang's real ``Scheduler`` in this process, on the CPU, with a model of a few hundred weights.

What SGLang does when it starts a scheduler process, without the process: publish the arguments, build the scheduler.
Only one lives in a process at a time. Nobody reads its output channels, so they are closed off.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import sglang.srt.managers.scheduler as sglang_scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import PortArgs, ServerArgs

from feather_sglang.adapter.ports import free_port
from feather_sglang.adapter.server_flags import read_flags, starting_with

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def build_scheduler(
    folder: Path, policy: str, context_length: int, server_flags: Sequence[str] = (), **arguments: Any
) -> Any:
    """Return a scheduler started with ``--schedule-policy policy``, its model's configuration written to ``folder``.

    The flags of SGLang's, a word each, overrule ``arguments`` and what is set here.
    """
    logging.getLogger("sglang").setLevel(logging.ERROR)
    (folder / "config.json").write_text(json.dumps({**_MODEL, "max_position_embeddings": context_length}))
    load_plugins()
    args = ServerArgs(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        mem_fraction_static=0.3,
        context_length=context_length,
        schedule_policy=policy,
        nccl_port=free_port(),
        log_level="error",
        **{"disable_overlap_schedule": True, "random_seed": 0, **arguments, **read_flags(server_flags)},
    )
    ports = PortArgs.init_new(args)
    try:
        with starting_with(server_flags):
            scheduler = start_scheduler(args, ports)
            args.check_server_args()
    finally:  # the files that SGLang makes for its sockets and leaves; nobody connects to them
        for address in astuple(ports):
            if str(address).startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
    scheduler.load_snapshot_writer = None  # load reports to a router: not scheduling, and dear on a long queue
    # The classes have slots: their methods are replaced, in a process that runs nothing else.
    for channel, method in (
        (scheduler.output_streamer, "stream_output"),
        (scheduler.ipc_channels.send_to_tokenizer, "send_output"),
    ):
        setattr(type(channel), method, lambda *args, **kwargs: None)
    return scheduler


def start_scheduler(args: ServerArgs, ports: PortArgs) -> Any:
    """Return SGLang's scheduler of these arguments, built as its process of rank 0 builds it."""
    if "gpu_id" in inspect.signature(sglang_scheduler.Scheduler.__init__).parameters:
        sglang_scheduler.publish(args, role="scheduler")
        return sglang_scheduler.Scheduler(args, ports, 0, 0, 0, 0, 0, 0, None)
    ranks = sglang_scheduler.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    sglang_scheduler.publish(args, role="scheduler", ranks=ranks)
    return sglang_scheduler.Scheduler(args, ports)
