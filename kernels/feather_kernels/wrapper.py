"""Prefix-packed decode attention on the GPU: plan once a batch, run once a layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from feather_kernels.build import load_kernel
from feather_kernels.device import Device
from feather_kernels.errors import PlanError
from feather_kernels.forest import Forest
from feather_kernels.options import tail_warps_of
from feather_kernels.plan import PackPlan, Planner, default_parts
from feather_kernels.tiles import built_tiles, chosen_tiles, n_choices

LAUNCHES = ("persistent", "streams", "serial")
PATHS = ("auto", "portable", "hopper")
_PREFETCH, _PORTABLE = 1, 2
_COUNTERS = 16  # per queue: work units popped, and CTAs that have left
FP8 = torch.float8_e4m3fn
_NOT_PUBLISHED = -1  # a partial row's stats, as int32, before anybody has written them (csrc/common/partial.cuh)


class PackedDecodeWrapper:
    """Decode attention that reads each shared KV token once for a tile of query rows (PAT, sections 4 to 7).

    `plan` packs a batch by its prefix forest; `run` attends with that plan, once per layer, as long as it is valid.
    Scratch memory and the device's copy of the plan keep their addresses while ``max_requests`` and ``max_parts``
    hold, so `run` may be captured in a CUDA graph and replayed after another `plan`.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Query heads and KV heads; the first a multiple of the second, at most 16 times.
    head_dim : {64, 128, 256}
    page_size : int
        Tokens per entry of the table, a power of two.
    dtype : torch.dtype
        float16 or bfloat16, of queries, output, and caches unless they have another.
    kv_dtype : torch.dtype, optional
        float8_e4m3fn: of caches that hold values divided by a scale a tensor (see `run`).
    device : torch.device or str
    max_requests : int
        Requests of the largest batch.
    max_parts : int, optional
        Partial results of the largest plan; default `feather_kernels.plan.default_parts`.
    strategy : str, optional
        How to pack (see `feather_kernels.plan.Planner`). By default "time" on the Hopper path, where its costs were
        measured, and "profit" elsewhere.
    split : str, optional
        How to split long KV ranges. By default "rounds" on the Hopper path, and "balanced" elsewhere.
    tiles : sequence of (m, n), optional
        The tile shapes to use: the largest one or more of `feather_kernels.tiles.built_tiles`; another n of
        `feather_kernels.tiles.n_choices` is another library. By default all, with the n that the GPU's profile has for
        long KV (`feather_kernels.tiles.chosen_tiles`), if the path is the one for this GPU.
    launch : {"persistent", "streams", "serial"}
        One launch for all tile shapes; or one launch a shape, on parallel streams (PAT 6) or one after the other.
    merge : {"fused", "kernel"}, optional
        Who combines a request's parts: the unit that computes its last one, or a second kernel (PAT 7). "fused" needs
        one launch and a tile of at most 16 rows that holds a request's query heads, and is the default where it has
        them. Its units wait for each other, so two such wrappers must not run at the same time on two streams.
    prefetch : bool
        Prefetch the next KV tile into L2 (``cp.async.bulk.prefetch.L2``).
    logit_soft_cap : float
        Scores become ``cap * tanh(score / cap)``; 0 for none.
    sm_scale : float, optional
        Scale of the scores, ``head_dim ** -0.5`` by default.
    sinks : bool
        Whether `run` will be given attention sinks. Its kernels, and those with or without a soft cap, are loaded here;
        others at their first `run`, or by `load`.
    window_left : int
        Sliding window; only -1 (none) is supported.
    path : {"auto", "portable", "hopper"}
        Copy instructions: those of compute capability 8.0, or those of 9.0.
    debug : bool
        Check in `run` that every slot lies inside the caches (synchronises).

    Raises
    ------
    ValueError
        An argument that is not supported.
    BuildError
        No kernel for this GPU, or nothing to build it with.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 1,
        dtype: torch.dtype = torch.float16,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        max_requests: int = 1024,
        max_parts: int | None = None,
        strategy: str | None = None,
        split: str | None = None,
        tiles: tuple[tuple[int, int], ...] | None = None,
        launch: str = "persistent",
        merge: str | None = None,
        prefetch: bool = False,
        logit_soft_cap: float = 0.0,
        sm_scale: float | None = None,
        sinks: bool = False,
        window_left: int = -1,
        path: str = "auto",
        debug: bool = False,
        **planner_options: Any,
    ) -> None:
        if min(num_kv_heads, num_qo_heads) < 1 or num_qo_heads % num_kv_heads:
            raise ValueError(f"{num_qo_heads} query heads on {num_kv_heads} KV heads: give a multiple")
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}: give a power of two")
        if window_left != -1:
            raise ValueError(f"window_left is {window_left}: sliding windows are not supported, use another backend")
        if logit_soft_cap < 0:
            raise ValueError(f"logit_soft_cap is {logit_soft_cap}: give 0 (none) or a positive cap")
        if sm_scale is not None and not sm_scale > 0:
            raise ValueError(f"sm_scale is {sm_scale}: give a positive scale")
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}: use torch.float16 or torch.bfloat16")
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        if kv_dtype not in (dtype, FP8):
            raise ValueError(f"kv_dtype is {kv_dtype}: use {dtype}, as queries have, or {FP8}")
        for name, value, known in (("launch", launch, LAUNCHES), ("path", path, PATHS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}: use one of {', '.join(known)}")
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device is {self.device}: the kernels need a CUDA device")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability(self.device)
        if path == "hopper" and major < 9:
            raise ValueError(
                f"path is 'hopper', but {torch.cuda.get_device_name(self.device)} is compute {major}.{minor}"
            )
        self.num_qo_heads, self.num_kv_heads, self.head_dim = num_qo_heads, num_kv_heads, head_dim
        self.page_size, self.dtype, self.kv_dtype, self.debug = page_size, dtype, kv_dtype, debug
        self.launch = launch
        self.sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.logit_soft_cap = logit_soft_cap
        self.path = "portable" if path == "portable" or major < 9 else "hopper"
        self._flags = _PREFETCH * prefetch | _PORTABLE * (self.path == "portable")
        built, own = built_tiles(self.path, head_dim), "hopper" if major >= 9 else "portable"
        rules = Device.of(self.device).n_rule if self.path == own else {}
        self._tiles = tuple(sorted((m, n) for m, n in tiles or chosen_tiles(self.path, head_dim, rules)))
        if [m for m, _ in self._tiles] != [m for m, _ in built[-len(self._tiles) :]]:
            raise ValueError(f"tiles are {self._tiles}: use the largest one or more of {built}")
        group = num_qo_heads // num_kv_heads
        if group > self._tiles[-1][0]:
            raise ValueError(f"{group} query heads to a KV head: the largest tile holds {self._tiles[-1][0]}")
        others = tuple((self.path, m, n) for m, n in self._tiles if (m, n) not in built)
        for _, m, n in others:
            if n not in n_choices(self.path, m, head_dim):
                raise ValueError(f"tiles are {self._tiles}: for m = {m} n may be {n_choices(self.path, m, head_dim)}")
        causal = bool(planner_options.get("causal_tails"))
        if causal and self.path != "hopper":
            raise ValueError("causal_tails is True: that needs the path 'hopper'")
        self._build = str(dtype).removeprefix("torch."), head_dim, 10 * major + minor, others, causal
        self._modules: dict[tuple[bool, bool], Any] = {}
        self.load(logit_soft_cap > 0, sinks)
        may_fuse = launch == "persistent" and max(self._tiles[0][0], group) <= 16
        if merge == "fused" and not may_fuse:
            raise ValueError(
                "merge is 'fused': that needs launch='persistent', a tile of at most 16 rows, and no more query heads "
                "to a KV head"
            )

        max_parts = default_parts(max_requests, num_qo_heads) if max_parts is None else max_parts
        properties = torch.cuda.get_device_properties(self.device)
        self.planner = Planner(
            num_qo_heads, num_kv_heads, head_dim, tiles=self._tiles,
            strategy=strategy or ("time" if self.path == "hopper" else "profit"),
            split=split or ("rounds" if self.path == "hopper" else "balanced"),
            merge=merge or ("fused" if may_fuse else "kernel"), n_sm=properties.multi_processor_count,
            max_requests=max_requests, max_parts=max_parts,
            kv_value_bytes=kv_dtype.itemsize,
            **{"tail_warps": tail_warps_of(self.path, head_dim), **planner_options},
        )  # fmt: skip
        self.pack_plan: PackPlan | None = None
        size = len(self.planner.buffer)
        self._plan = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._staging]
        self._turn = 0
        self._part_out = torch.empty(max_parts, num_qo_heads, head_dim, dtype=torch.int16, device=self.device)
        self._part_stats = torch.full(
            (max_parts, num_qo_heads, 2), _NOT_PUBLISHED, dtype=torch.int32, device=self.device
        )
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=self.device)
        self._table: torch.Tensor | None = None
        self._seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=self.device)
        self._streams = [torch.cuda.Stream(self.device) for _ in self._tiles] if launch == "streams" else []

    def load(self, soft_cap: bool, sinks: bool) -> Any:
        """The kernels with or without a soft cap and attention sinks, compiled if need be, which takes a minute.

        What `run` will need while a CUDA graph is captured has to be loaded before.

        Raises
        ------
        BuildError
            Nothing to build them with.
        """
        dtype, head_dim, capability, tiles, causal = self._build
        fp8_kv = self.kv_dtype == FP8
        module = load_kernel(dtype, head_dim, capability, soft_cap, tiles, sinks, fp8_kv, causal)
        self._modules[soft_cap, sinks] = module
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
        if table.dtype not in (torch.int32, torch.int64) or table.device != self.device or not table.is_contiguous():
            raise PlanError(
                f"table is {table.dtype} on {table.device}: give a contiguous int32 or int64 tensor on {self.device}"
            )
        starts = forest.row_offset[forest.seq_len > 0]  # nothing is read of other rows: they may begin at the end
        if len(starts) and int(starts.max()) >= table.numel():
            raise PlanError(f"a row starts at entry {int(starts.max())} of a table of {table.numel()}")
        if seq_lens is not None and (
            seq_lens.dtype != torch.int32 or seq_lens.device != self.device or seq_lens.shape != (forest.n_requests,)
            or not seq_lens.is_contiguous()
        ):  # fmt: skip
            raise PlanError(
                f"seq_lens is {seq_lens.dtype} {list(seq_lens.shape)} on {seq_lens.device}: give int32 "
                f"[{forest.n_requests}] on {self.device}"
            )
        plan = self.planner.plan(forest)
        self._turn = 1 - self._turn
        staging, copied = self._staging[self._turn], self._copied[self._turn]
        copied.synchronize()  # the copy before last has left this buffer
        used = plan.used
        staging.numpy()[:used] = plan.buffer[:used]
        self._plan[:used].copy_(staging[:used], non_blocking=True)
        if seq_lens is None:
            self._seq_lens[: forest.n_requests].copy_(torch.from_numpy(np.array(forest.seq_len)))
            seq_lens = self._seq_lens
        copied.record(torch.cuda.current_stream(self.device))  # which need not be the current device
        self.pack_plan, self._table, self._lens = plan, table, seq_lens
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
        self._check_kv_scales(k_scale, v_scale)
        module = self._module_for(scale, cap, sinks)
        arguments = self._arguments(q, k_cache, v_cache, out, lse, scale * k_scale, cap, sinks, v_scale)
        with torch.cuda.device(self.device):
            if self.launch == "persistent":
                module.forward(*arguments, (1 << len(self._tiles)) - 1)
            elif self.launch == "serial":
                for queue in range(len(self._tiles)):
                    module.forward(*arguments, 1 << queue)
            else:
                self._run_on_streams(module, arguments)
            if self.planner.options.merge == "kernel" and (
                self.pack_plan.n_parts or torch.cuda.is_current_stream_capturing()
            ):
                module.merge(*arguments)  # in a graph always, as it may meet parts later
        return (out, lse) if lse is not None else out

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
        with torch.cuda.device(self.device):
            arguments = self._arguments(q, k_cache, v_cache, out, None, self.sm_scale, self.logit_soft_cap, None)
            self._module_for(self.sm_scale, self.logit_soft_cap, None).forward(*arguments, 1 << queue)

    def _module_for(self, scale: float, cap: float, sinks: torch.Tensor | None) -> Any:
        """The kernels for these scores."""
        if not scale > 0 or cap < 0:
            raise PlanError(f"sm_scale is {scale} and logit_soft_cap {cap}: give a positive scale and no negative cap")
        if sinks is not None and (
            sinks.shape != (self.num_qo_heads,) or sinks.dtype not in (torch.float32, self.dtype)
            or sinks.device != self.device or not sinks.is_contiguous()
        ):  # fmt: skip
            raise PlanError(
                f"sinks is {sinks.dtype} {list(sinks.shape)} on {sinks.device}: give {self.dtype} or float32 "
                f"[{self.num_qo_heads}] on {self.device}"
            )
        scores = cap > 0, sinks is not None
        if (module := self._modules.get(scores)) is not None:
            return module
        if torch.cuda.is_current_stream_capturing():
            raise PlanError(f"run() is captured and its kernels are not loaded: call load{scores} before")
        return self.load(*scores)

    def _check_kv_scales(self, k_scale: float, v_scale: float) -> None:
        if self.kv_dtype != FP8 and (k_scale, v_scale) != (1.0, 1.0):
            raise PlanError(f"k_scale is {k_scale} and v_scale {v_scale}: caches in {self.kv_dtype} have none")
        if not (0 < k_scale < math.inf and 0 < v_scale < math.inf):
            raise PlanError(f"k_scale is {k_scale} and v_scale {v_scale}: give finite scales above 0")

    def _arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
        scale: float, cap: float, sinks: torch.Tensor | None, v_scale: float = 1.0,
    ) -> tuple[Any, ...]:  # fmt: skip
        if self.kv_dtype == FP8:  # not every exchange of tensors knows the type
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        return (
            q, k, v, out, lse, self._part_out, self._part_stats, self._counters, self._plan, self._lens, self._table,
            self.page_size.bit_length() - 1, scale, cap, sinks, v_scale, self._flags,
        )  # fmt: skip

    def _run_on_streams(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """One launch a tile shape, each on its own stream, joined before returning (PAT 6)."""
        current = torch.cuda.current_stream(self.device)
        begin = torch.cuda.Event()
        begin.record(current)
        for queue, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                stream.wait_event(begin)
                module.forward(*arguments, 1 << queue)
                end = torch.cuda.Event()
                end.record(stream)
            current.wait_event(end)

    def _flat(self, cache: torch.Tensor) -> torch.Tensor:
        """(pages, page_size, heads, head_dim) as (slots, heads, head_dim)."""
        if (
            cache.dim() == 4
            and cache.shape[1] == self.page_size
            and cache.stride(0) == self.page_size * cache.stride(1)
        ):
            return cache.flatten(0, 1)
        return cache

    def _checked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches by slots, if all tensors fit the plan."""
        if self.pack_plan is None or self._table is None:
            raise PlanError("run() before plan(): plan the batch first")
        k, v = self._flat(k), self._flat(v)
        requests = self.pack_plan.n_requests
        shape = (requests, self.num_qo_heads, self.head_dim)
        for name, tensor in (("q", q), ("out", out)):
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise PlanError(f"{name} is {list(tensor.shape)}, the plan is for {list(shape)}: plan this batch first")
            if (
                tensor.stride(2) != 1
                or tensor.stride(1) != self.head_dim
                or tensor.stride(0) % 8
                or tensor.data_ptr() % 16
            ):
                raise PlanError(
                    f"{name} has strides {tensor.stride()}: its heads must lie side by side, rows 16-byte aligned"
                )
        for name, tensor in (("k_cache", k), ("v_cache", v)):
            if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (self.num_kv_heads, self.head_dim):
                raise PlanError(
                    f"{name} is {list(tensor.shape)}: give (slots, {self.num_kv_heads}, {self.head_dim}) or "
                    f"(pages, {self.page_size}, {self.num_kv_heads}, {self.head_dim})"
                )
            if (
                tensor.stride(2) != 1
                or tensor.stride(0) * tensor.element_size() % 16
                or tensor.data_ptr() % 16
                or (self.num_kv_heads > 1 and tensor.stride(1) != self.head_dim)
            ):
                raise PlanError(
                    f"{name} has strides {tensor.stride()}: a slot's heads must lie side by side, 16-byte aligned"
                )
        dtypes = (("q", q, self.dtype), ("k_cache", k, self.kv_dtype), ("v_cache", v, self.kv_dtype))
        for name, tensor, dtype in (*dtypes, ("out", out, self.dtype)):
            if tensor is not None and (tensor.dtype != dtype or tensor.device != self.device):
                raise PlanError(
                    f"{name} is {tensor.dtype} on {tensor.device}: the wrapper is for {dtype} on {self.device}"
                )
        if self.debug:
            self._check_slots(min(len(k), len(v)))
        return k, v

    def _check_slots(self, slots: int) -> None:
        """Every table entry that the requests reach must lie inside the caches."""
        assert self.pack_plan is not None and self._table is not None
        flat = self._table.flatten()
        lens = self._lens[: self.pack_plan.n_requests].cpu().tolist()
        for request, (offset, tokens) in enumerate(zip(self.pack_plan.row_offset.tolist(), lens, strict=True)):
            pages = -(-tokens // self.page_size)
            row = flat[offset : offset + pages]
            if len(row) < pages:
                raise PlanError(f"request {request} has {tokens} tokens, its table row ends after {len(row)} entries")
            if pages and (int(row.min()) < 0 or (int(row.max()) + 1) * self.page_size > slots):
                bad = int(row.min()) if int(row.min()) < 0 else int(row.max())
                raise PlanError(f"request {request} reads page {bad}, outside a cache of {slots} slots")
