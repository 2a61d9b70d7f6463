"""The installed SGLang's real Scheduler in this process, with a tiny random model and real forward passes.

Nothing of SGLang is replaced but the last hop of a finished token: the output streamer, which would talk to another
process. A test submits requests, steps the scheduler, and looks at it between steps.
"""

from __future__ import annotations

import gc
import inspect
import json
from array import array
from collections import deque

import pytest
import sglang.srt.managers.scheduler as sglang_scheduler
import sglang.srt.models.registry  # noqa: F401  imports every model, which the first scheduler would do
import torch
import zmq
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.watchdog import WatchdogRaw

from feather_sglang.adapter.inprocess import start_scheduler
from feather_sglang.adapter.ports import free_port
from feather_sglang.adapter.scheduler.debug_check import DebugCheck


def _socket_without_linger(context, *args, _socket=zmq.Context.socket, **kwargs):
    socket = _socket(context, *args, **kwargs)
    socket.linger = 0  # nobody reads what the scheduler sends: closing must not wait for it
    _contexts.add(context)  # nor may a collected context wait for sockets that a failed start-up left open
    return socket


_contexts = set()


zmq.Context.socket = _socket_without_linger

# Its thread never ends, and would keep each scheduler, with its pools and the threads of its process groups, for good.
WatchdogRaw._watchdog_thread = lambda watchdog: None

try:
    from sglang.srt.distributed import bootstrap
except ImportError:  # before 0.5.21
    bootstrap = None

# One layer, as most tests look at the scheduler: each further one takes a quarter of the time of a whole step.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def take_down():
    """Undo what SGLang builds once per process, whether its start-up succeeded or not."""
    gc.collect()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    if bootstrap is not None:
        bootstrap._PARALLEL_INITIALISED = False


def runner_of(server):
    """The model runner of a server's only rank."""
    return server.scheduler.tp_worker.model_runner


def spread_weights(server):
    """Weights with which tokens depend on the whole prompt, which they hardly do with SGLang's dummy weights."""
    generator = torch.Generator().manual_seed(5)
    for name, weights in runner_of(server).model.named_parameters():
        if "norm" in name:
            weights.data.fill_(1)
        else:
            weights.data.copy_(torch.randn(weights.shape, generator=generator) * 2 * weights.shape[-1] ** -0.5)


_KNOWN = frozenset(inspect.signature(TokenizedGenerateReqInput).parameters)


def tokenized(rid, tokens, params, **more):
    """A request as the tokenizer sends it; what this release does not know is left out."""
    params.normalize(None)
    fields = {
        "rid": rid,
        "input_text": "",
        "input_ids": array("q", tokens),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": [],
        "sampling_params": params,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
        **more,
    }
    return TokenizedGenerateReqInput(**{name: value for name, value in fields.items() if name in _KNOWN})


class Server:
    """One scheduler; ``requests`` keeps every request submitted, by id.

    Steps take as long as this machine happens to take, so nobody is held for prefill that gathers by default: who needs
    that says ``paced``, or sets the option and a clock.
    """

    def __init__(self, folder, policy, paced=False, config=CONFIG, **overrides):
        (folder / "config.json").write_text(json.dumps(config))
        take_down()
        load_plugins()
        arguments = {
            "model_path": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.3,
            "max_total_tokens": 4096,
            "schedule_policy": policy,
            "random_seed": 1,
            "nccl_port": free_port(),
            "log_level": "error",
            **overrides,
        }
        args = ServerArgs(**arguments)
        ports = PortArgs.init_new(args)
        getattr(args, "resolve_once", dict)()  # since 0.5.21
        args.check_server_args()
        self.scheduler = self.start(args, ports)
        # Their classes have slots, so the methods are replaced there.
        type(self.scheduler.output_streamer).stream_output = lambda *args, **kwargs: None
        type(self.scheduler.ipc_channels.send_to_tokenizer).send_output = lambda *args, **kwargs: None
        self.requests = {}
        self.steps = 0
        if policy.startswith("feather") and self.feather.options.pace is None and not paced:
            self.feather.admission.prefill_delay = None

    def start(self, args, ports):
        return start_scheduler(args, ports)

    @property
    def feather(self):
        return self.scheduler.feather

    def submit(
        self,
        rid,
        tokens,
        max_new_tokens=8,
        priority=None,
        extra_key=None,
        lora_id=None,
        logprobs=None,
        ignore_eos=True,
        **sampling,
    ):
        """Queue a request as the tokenizer would send it; False if the scheduler turned it away."""
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos, **sampling)
        logged = {"return_logprob": logprobs is not None, "top_logprobs_num": logprobs or 0}
        request = tokenized(rid, tokens, params, priority=priority, extra_key=extra_key, lora_id=lora_id, **logged)
        params.verify(CONFIG["vocab_size"])
        before = len(self.scheduler.waiting_queue)
        self.scheduler.handle_generate_request(request)
        if len(self.scheduler.waiting_queue) == before:
            return False
        self.requests[rid] = self.scheduler.waiting_queue[-1]
        return True

    def abort(self, rid):
        self.scheduler.abort_request(AbortReq(rid=rid))

    @torch.no_grad()
    def step(self):
        """One turn of SGLang's event_loop_normal; returns what ran, or None."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        self.steps += 1
        return batch

    def drain(self, limit=5000):
        """Step until nothing waits or runs."""
        for _ in range(limit):
            if self.step() is None and not self.scheduler.waiting_queue:
                return
        pytest.fail(f"{len(self.scheduler.waiting_queue)} requests still wait after {limit} steps")

    def outputs(self):
        return {rid: list(req.output_ids) for rid, req in self.requests.items()}

    def assert_nothing_left(self):
        """Every pool is full again but for what the prefix cache keeps, and the tree is empty."""
        scheduler = self.scheduler
        self.step()
        self.assert_pools_full()
        assert scheduler.running_batch.is_empty() and not scheduler.waiting_queue and scheduler.chunked_req is None
        if hasattr(scheduler, "feather"):
            DebugCheck(self.feather).check(scheduler.running_batch, None)
            assert not self.feather.failed
            assert len(self.feather.admission.tree) == 0 and not self.feather.admission.state.fairness.arrivals

    def assert_pools_full(self):
        scheduler = self.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        assert free == scheduler.max_total_num_tokens

    def close(self):
        """Drop the scheduler; the next one takes down what this one leaves in the process."""
        del self.scheduler


class OverlapServer(Server):
    """A server in the overlap scheduler's order: a step is launched before the one before has been processed."""

    def __init__(self, folder, policy, **overrides):
        super().__init__(folder, policy, disable_overlap_schedule=False, **overrides)
        with pytest.MonkeyPatch.context() as patch:  # it makes the streams, and returns
            patch.setattr(sglang_scheduler, "dispatch_event_loop", lambda scheduler: None)
            self.scheduler.run_event_loop()
        self.scheduler.result_queue = deque()

    @torch.no_grad()
    def step(self):
        """One turn of SGLang's event_loop_overlap; returns what was launched, or None."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch, result = plan.batch_to_run, None
        in_turn = scheduler.is_disable_overlap_for_batch(batch, last_batch=scheduler.last_batch)
        if in_turn:
            self._process()
        if batch:
            result = scheduler.run_batch(batch)
            scheduler._apply_war_barrier()
            scheduler.result_queue.append((batch.copy(), result))
        if scheduler.last_batch and not in_turn:
            self._process()
        scheduler.launch_batch_sample_if_needed(result, batch)
        scheduler.last_batch = batch
        self.steps += 1
        return batch

    def _process(self):
        self.scheduler.process_batch_result(*self.scheduler.result_queue.popleft())
