"""Prefix-packed decode attention on the GPU: plan once a batch, run once a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from feather_kernels.config import FP8, KernelConfig
from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.inputs import check_batch, check_kv_scales, check_scores, check_sinks, check_slots, checked_tensors
from feather_kernels.plan import PackPlan, Planner, default_parts
from feather_kernels.scratch import Scratch

_PREFETCH, _PORTABLE = 1, 2  # flags of csrc/packed_decode.cu
Launch = Callable[[Callable[..., None], tuple[Any, ...]], None]
_OF_KERNELS = {spec.name for spec in fields(KernelConfig)}


class PackedDecodeWrapper:
    """Decode attention that reads each shared KV token once for a tile of query rows (PAT, sections 4 to 7).

    `plan` packs a batch by its prefix forest; `run` attends with that plan, once per layer, as long as it is valid.
    Scratch memory and the device's copy of the plan keep their addresses while ``max_requests`` and ``max_parts``
    hold, so `run` may be captured in a CUDA graph and replayed after another `plan`.

    Parameters
    ----------
    num_qo_heads, num_kv_heads, head_dim : int
        The attention layer, as for `KernelConfig`.
    page_size : int
        Tokens per entry of the table, a power of two.
    max_requests : int
        Requests of the largest batch.
    max_parts : int, optional
        Partial results of the largest plan; default `feather_kernels.plan.default_parts`.
    sm_scale : float, optional
        Scale of the scores, ``head_dim ** -0.5`` by default.
    logit_soft_cap : float
        Scores become ``cap * tanh(score / cap)``; 0 for none.
    sinks : bool
        Whether `run` will be given attention sinks. Its kernels, and those with or without a soft cap, are loaded here;
        others at their first `run`, or by `load`.
    launch : {"persistent", "streams", "serial"}
        One launch for all tile shapes; or one launch a shape, on parallel streams (PAT 6) or one after the other.
    prefetch : bool
        Prefetch the next KV tile into L2 (``cp.async.bulk.prefetch.L2``).
    debug : bool
        Check in `run` that every slot lies inside the caches (synchronises).
    **options
        The other fields of `KernelConfig` (``dtype``, ``kv_dtype``, ``device``, ``path``, ``tiles``), and of
        `feather_kernels.options.PlannerOptions`. By default ``strategy`` is "time" and ``split`` "rounds" on the Hopper
        path, where their costs were measured, and "profit" and "balanced" elsewhere. ``merge`` says who combines a
        request's parts: the unit that computes its last one, or a second kernel (PAT 7). "fused" needs one launch and a
        tile of at most 16 rows that holds a request's query heads, and is the default where it has them. Its units wait
        for each other, so two such wrappers must not run at the same time on two streams.

    Raises
    ------
    ValueError
        An argument that is not supported.
    BuildError
        No kernel for this GPU, or nothing to build it with.
    """

    def __init__(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, *, page_size: int = 1, max_requests: int = 1024,
        max_parts: int | None = None, sm_scale: float | None = None, logit_soft_cap: float = 0.0, sinks: bool = False,
        launch: str = "persistent", prefetch: bool = False, debug: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}: give a power of two")
        self.page_size, self.debug = page_size, debug
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.logit_soft_cap = logit_soft_cap
        check_scores(self.sm_scale, logit_soft_cap)
        options = {name: value for name, value in options.items() if value is not None}
        kernels = {name: options.pop(name) for name in _OF_KERNELS & options.keys()}
        self.config = config = self._configured(num_qo_heads, num_kv_heads, head_dim, **kernels)
        self._flags = _PREFETCH * prefetch | _PORTABLE * (config.path == "portable")
        self._launch = _launcher(launch, config.device, len(config.tiles))
        self._modules: dict[tuple[bool, bool], Any] = {}
        self.load(logit_soft_cap > 0, sinks)
        may_fuse = launch == "persistent" and config.may_fuse
        if options.get("merge") == "fused" and not may_fuse:
            raise ValueError(
                "merge is 'fused': that needs launch='persistent', a tile of at most 16 rows, and no more query heads "
                "to a KV head"
            )
        max_parts = default_parts(max_requests, num_qo_heads) if max_parts is None else max_parts
        defaults = {**config.planner_defaults, "merge": "fused" if may_fuse else "kernel"}
        self.planner = Planner(
            num_qo_heads, num_kv_heads, head_dim, max_requests=max_requests, max_parts=max_parts, tiles=config.tiles,
            n_sm=torch.cuda.get_device_properties(config.device).multi_processor_count, **(defaults | options),
        )  # fmt: skip
        self.scratch = Scratch(config, len(self.planner.buffer), max_requests, max_parts)
        self._part_out, self._part_stats = self.scratch.part_out, self.scratch.part_stats  # for the checks
        self.pack_plan: PackPlan | None = None
        self._table: torch.Tensor | None = None

    def _configured(self, num_qo_heads: int, num_kv_heads: int, head_dim: int, **kernels: Any) -> KernelConfig:
        return KernelConfig(num_qo_heads, num_kv_heads, head_dim, **kernels)

    def load(self, soft_cap: bool, sinks: bool) -> Any:
        """The kernels with or without a soft cap and attention sinks, compiled if need be, which takes a minute.

        What `run` will need while a CUDA graph is captured has to be loaded before.

        Raises
        ------
        BuildError
            Nothing to build them with.
        """
        module = self._modules[soft_cap, sinks] = self.config.load(soft_cap, sinks)
        return module

    def plan(self, forest: Forest, table: torch.Tensor, seq_lens: torch.Tensor | None = None) -> PackPlan:
        """Pack a batch; the plan is copied to the device in the current stream.

        Parameters
        ----------
        forest : Forest
            What the requests share; ``forest.row_offset`` indexes ``table``.
        table : torch.Tensor
            int32 or int64 on the device, contiguous: page ids (slot ids at page size 1), in rows or flat. Read by
            every `run`, so it may be refilled in place.
        seq_lens : torch.Tensor, optional
            int32 [requests] on the device, KV tokens of each request, read by every `run`; they may grow under a
            valid plan. By default a copy of ``forest.seq_len``.

        Returns
        -------
        PackPlan
            Also kept as ``pack_plan``.

        Raises
        ------
        ValueError
            A batch that does not fit the wrapper, or tensors of the wrong kind.
        """
        check_batch(forest, table, seq_lens, self.config.device, self.page_size)
        plan = self.planner.plan(forest)
        self._lens = self.scratch.take(plan, seq_lens)
        self.pack_plan, self._table = plan, table
        return plan

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        *,
        sm_scale: float | None = None,
        logit_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with the last plan; layers that differ in scores only share one.

        Parameters
        ----------
        q : torch.Tensor
            (requests, num_qo_heads, head_dim): one query token a request, in the forest's order.
        k_cache, v_cache : torch.Tensor
            (slots, num_kv_heads, head_dim), or (pages, page_size, num_kv_heads, head_dim).
        out : torch.Tensor, optional
            Like ``q``.
        return_lse : bool
            Also return the log-sum-exp of the scores (natural logarithm).
        sm_scale, logit_soft_cap : float, optional
            Other ones than the wrapper's.
        sinks : torch.Tensor, optional
            (num_qo_heads): logits that join each request's softmax, and its log-sum-exp, with no value; float32, or
            the wrapper's dtype.
        k_scale, v_scale : float
            What keys and values in float8 stand for times.

        Returns
        -------
        out : torch.Tensor
            Like ``q``; rows of requests without KV tokens are 0.
        lse : torch.Tensor
            float32 (requests, num_qo_heads), if asked for.

        Raises
        ------
        ValueError
            No plan, or tensors that do not fit it; nothing is written then.
        """
        k_cache, v_cache = self._checked(q, k_cache, v_cache, out)
        assert self.pack_plan is not None
        if out is None:
            out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        scale = self.sm_scale if sm_scale is None else sm_scale
        cap = self.logit_soft_cap if logit_soft_cap is None else logit_soft_cap
        check_kv_scales(self.config.kv_dtype, k_scale, v_scale)
        module = self._module_for(scale, cap, sinks)
        arguments = self._arguments(q, k_cache, v_cache, out, lse, scale * k_scale, cap, sinks, v_scale)
        self._launch_all(module, arguments)
        return (out, lse) if lse is not None else out

    def _launch_all(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """The forward kernel, and the one that merges, where there is one."""
        assert self.pack_plan is not None
        with torch.cuda.device(self.config.device):
            self._launch(module.forward, arguments)
            if self.planner.options.merge == "kernel" and (
                self.pack_plan.n_parts or torch.cuda.is_current_stream_capturing()
            ):
                module.merge(*arguments)  # in a graph always, as it may meet parts later

    def run_queue(
        self, queue: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Launch one tile's queue of the last plan alone, to measure it; ``out`` is not complete after it.

        Parameters
        ----------
        queue : int
            Counted from the tile of the largest m.
        q, k_cache, v_cache, out : torch.Tensor
            As for `run`.

        Raises
        ------
        ValueError
            As `run`, or units that would wait for those of other queues: use ``merge="kernel"``.
        """
        if self.planner.options.merge != "kernel":
            raise PlanError("run_queue() needs merge='kernel': units of one queue wait for those of others otherwise")
        k_cache, v_cache = self._checked(q, k_cache, v_cache, out)
        with torch.cuda.device(self.config.device):
            arguments = self._arguments(q, k_cache, v_cache, out, None, self.sm_scale, self.logit_soft_cap, None)
            self._module_for(self.sm_scale, self.logit_soft_cap, None).forward(*arguments, 1 << queue)

    def _module_for(self, scale: float, cap: float, sinks: torch.Tensor | None) -> Any:
        """The kernels for these scores."""
        check_scores(scale, cap)
        if sinks is not None:
            check_sinks(self.config, sinks)
        scores = cap > 0, sinks is not None
        if (module := self._modules.get(scores)) is not None:
            return module
        if torch.cuda.is_current_stream_capturing():
            raise PlanError(f"run() is captured and its kernels are not loaded: call load{scores} before")
        return self.load(*scores)

    def _arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
        scale: float, cap: float, sinks: torch.Tensor | None, v_scale: float = 1.0,
    ) -> tuple[Any, ...]:  # fmt: skip
        if self.config.kv_dtype == FP8:  # not every exchange of tensors knows the type
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        tables = self._lens, self._table, self.page_size.bit_length() - 1
        return (q, k, v, out, lse, *self.scratch.tensors, *tables, scale, cap, sinks, v_scale, None, self._flags)

    def _checked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches by slots, if all tensors fit the plan."""
        if self.pack_plan is None or self._table is None:
            raise PlanError("run() before plan(): plan the batch first")
        k, v = checked_tensors(self.config, self.page_size, self.pack_plan.n_requests, q, k, v, out)
        if self.debug:
            check_slots(self.pack_plan, self._table, self._lens, self.page_size, min(len(k), len(v)))
        return k, v


def _launcher(name: str, device: torch.device, queues: int) -> Launch:
    """What launches the forward kernels for so many tile shapes."""
    if name == "persistent":
        every = (1 << queues) - 1
        return lambda forward, arguments: forward(*arguments, every)
    from feather_kernels.launches import LAUNCHES

    if name not in LAUNCHES:
        raise ValueError(f"launch is {name!r}: use one of persistent, {', '.join(LAUNCHES)}")
    launch: Launch = LAUNCHES[name](device, queues)
    return launch
