"""SGLang's own cache-aware policies on SGLang's own prefix cache, set up to be measured.

Everything here is the installed SGLang's: `Req`, `SchedulePolicy`, the KV allocator, and whichever prefix cache that
release builds by default (`RadixCache` to 0.5.18, then `UnifiedRadixCache`, from 0.5.21 in Rust). Only the limit
of 128 waiting requests, above which `lpm` falls back to arrival order, is lifted, as in the paper's section 5.3.1.

Where there is no GPU, `cpu_shims.install` comes before this module is imported.
"""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

import sglang

STOCK_POLICIES = ("lpm", "dfs-weight")


class StockRound(NamedTuple):
    """One call of `calc_priority`: how long it took, and the places in the queue of arrival, in the new order."""

    seconds: float
    order: list[int]


class StockPolicies:
    """A waiting queue of real requests before a real prefix cache that holds `cached` prompts.

    Parameters
    ----------
    cached : sequence of array("q")
        Prompts whose KV the cache holds, each of its own length.
    waiting : sequence of array("q")
        Prompts of the waiting requests, in order of arrival.
    """

    version: str = sglang.__version__

    def __init__(self, cached: Sequence[array[int]], waiting: Sequence[array[int]]) -> None:
        self.cache = _prefix_cache(slots=sum(map(len, cached)))
        for prompt in cached:
            slots = self.cache.token_to_kv_pool_allocator.alloc(len(prompt))
            self.cache.insert(InsertParams(key=RadixKey(token_ids=prompt, extra_key=None), value=slots))
        sampling = SamplingParams(max_new_tokens=200)
        self._queue = [
            Req(rid=str(place), origin_input_text="", origin_input_ids=prompt, sampling_params=sampling)
            for place, prompt in enumerate(waiting)
        ]
        self._policies = {name: _Unlimited(name, self.cache, False, False, False) for name in STOCK_POLICIES}

    @property
    def cache_name(self) -> str:
        """The cache's class, with its core where it has one."""
        core = getattr(self.cache, "tree_core", None)
        return type(self.cache).__name__ + (f" ({type(core).__name__})" if core is not None else "")

    def run_round(self, policy: str) -> StockRound:
        """Order the whole queue once by `policy`, as the scheduler does before each prefill batch."""
        queue = list(self._queue)
        schedule = self._policies[policy]
        start = time.perf_counter()
        schedule.calc_priority(queue)
        seconds = time.perf_counter() - start
        return StockRound(seconds, [int(request.rid) for request in queue])


class _Unlimited(SchedulePolicy):
    def _determine_active_policy(self, waiting_queue: list[Req]) -> Any:
        return self.policy


def _prefix_cache(slots: int) -> Any:
    """Return the prefix cache that this SGLang builds by default for a plain model, over `slots` KV slots."""
    server_args = ServerArgs(model_path="none", device="cpu")
    set_global_server_args_for_scheduler(server_args)
    # One layer with one head of one number: the policies order requests, nobody reads the KV.
    pool = MHATokenToKVPool(
        size=slots,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=1,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(size=1, max_context_len=1, device="cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(
            size=slots, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
        ),
        page_size=1,
    )
    plain_model = {
        "server_args": server_args,
        "params": params,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
        "effective_chunked_prefill_size": None,
        "tp_worker": None,
        "model_config": None,
        "tp_size": 1,
        "tp_rank": 0,
        "tp_group": None,
    }
    known = {field.name for field in dataclasses.fields(registry.TreeCacheBuildContext)}  # differs between releases
    context = registry.TreeCacheBuildContext(**{name: value for name, value in plain_model.items() if name in known})
    return registry.default_radix_cache_factory(context)
