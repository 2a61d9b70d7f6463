"""The systems that the decode benchmarks compare: this package and its ablations, FlashAttention-3, FlashInfer.

Each is set up once a batch (its plan is made there, outside every timing) and then called with nothing to decide.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from decode_cases import Case, attend, padded_slots

from feather_kernels import PackedDecodeWrapper
from feather_kernels.device import Device
from feather_kernels.tiles import built_tiles

FLASHINFER_WORKSPACE = 512 << 20  # bytes for its partial results
FP8 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.25, 0.5  # of caches in FP8: powers of two, so that 16 bits hold the same values
TRITON_SPLITS = 8  # SGLang's --triton-attention-num-kv-splits by default


class Unavailable(RuntimeError):
    """A system that does not exist here, or does not apply to a batch: why, in one line."""


class Inputs(NamedTuple):
    """One batch on the device."""

    case: Case
    q: torch.Tensor  # (requests, query heads, head_dim)
    k: torch.Tensor  # (slots, KV heads, head_dim)
    v: torch.Tensor
    wide: tuple[torch.Tensor, torch.Tensor]  # the same in 16 bits, where they have 8
    table: torch.Tensor  # int32 [entries]
    page_table: torch.Tensor  # int32 [requests, most pages]
    seq_lens: torch.Tensor  # int32 [requests]

    @property
    def scales(self) -> tuple[float, float]:
        """What k and v stand for times."""
        return (K_SCALE, V_SCALE) if self.k.dtype == FP8 else (1.0, 1.0)

    @property
    def paged_kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as (pages, page size, KV heads, head_dim)."""
        shape = (self.case.n_pages, self.case.page_size, *self.k.shape[1:])
        return self.k.view(shape), self.v.view(shape)


class Ready(NamedTuple):
    """A system set up for a batch."""

    call: Callable[[], torch.Tensor]
    bytes_moved: int | None = None  # by the plan's traffic model
    wrapper: Any = None


System = Callable[[Inputs], Ready]


class Pools:
    """Random K and V, drawn once for the largest batch; smaller batches use their beginning."""

    def __init__(
        self, elements: int, dtype: torch.dtype, device: str = "cuda", seed: int = 0, fp8: bool = False
    ) -> None:
        draw = torch.Generator(device).manual_seed(seed)
        self._dtype = dtype
        self.k = torch.empty(elements, dtype=dtype, device=device).normal_(generator=draw)
        self.v = torch.empty(elements, dtype=dtype, device=device).normal_(generator=draw)
        self.wide = self.k, self.v
        if fp8:
            self.k, self.v = (self.k / K_SCALE).to(FP8), (self.v / V_SCALE).to(FP8)
            for cache, wide, scale in zip((self.k, self.v), self.wide, (K_SCALE, V_SCALE), strict=True):
                wide.copy_(cache).mul_(scale)
        self._draw = draw

    @staticmethod
    def elements(case: Case) -> int:
        return case.n_slots * case.heads.kv * case.head_dim

    def inputs(self, case: Case) -> Inputs:
        """The batch with its tensors."""
        shape, device = (case.n_slots, case.heads.kv, case.head_dim), self.k.device
        size = self.elements(case)
        q = torch.empty(case.n_requests, case.heads.query, case.head_dim, dtype=self._dtype, device=device)
        wide_k, wide_v = (cache[:size].view(shape) for cache in self.wide)
        return Inputs(
            case,
            q.normal_(generator=self._draw),
            self.k[:size].view(shape),
            self.v[:size].view(shape),
            (wide_k, wide_v),
            torch.from_numpy(case.table).to(device),
            torch.from_numpy(case.page_table).to(device),
            torch.from_numpy(case.forest.seq_len).to(device),
        )


def reference(inputs: Inputs, requests: list[int]) -> torch.Tensor:
    """float32 [len(requests), query heads, head_dim]: what these requests' outputs must be."""
    case, device = inputs.case, inputs.k.device
    chosen = torch.tensor(requests, device=device)
    rows = torch.from_numpy(case.forest.row_offset).to(device)[chosen]
    lens = inputs.seq_lens[chosen].long()
    slots = padded_slots(inputs.table, rows, lens, case.page_size, int(lens.max()))
    return attend(inputs.q[chosen], *inputs.wide, slots, lens, case.head_dim**-0.5)[0]


def feather(wide: bool = False, **options: Any) -> System:
    """This package with the given arguments of `PackedDecodeWrapper`; ``wide``: on 16-bit caches in any case."""

    def set_up(inputs: Inputs) -> Ready:
        case = inputs.case
        if wide:
            inputs = inputs._replace(k=inputs.wide[0], v=inputs.wide[1])
        scales = dict(zip(("k_scale", "v_scale"), inputs.scales, strict=True))
        wrapper = PackedDecodeWrapper(
            case.heads.query, case.heads.kv, case.head_dim, page_size=case.page_size, dtype=inputs.q.dtype,
            kv_dtype=inputs.k.dtype, device=inputs.q.device, **{"max_requests": case.n_requests, **options},
        )  # fmt: skip
        plan = wrapper.plan(case.forest, inputs.table, inputs.seq_lens)
        out = torch.empty_like(inputs.q)

        def call() -> torch.Tensor:
            wrapper.run(inputs.q, inputs.k, inputs.v, out=out, **scales)
            return out

        return Ready(call, plan.scheduled_traffic.total, wrapper)

    return set_up


def feather_fixed(inputs: Inputs) -> Ready:
    """One tile shape for everything: the largest that is built, as the wrapper takes the largest one or more.

    On Hopper that is (128, 64) up to head_dim 128, not PAT's fixed 64 x 128, and (64, 64) beyond; elsewhere (64, 32).
    No tile of at most 16 rows is left, so a second kernel merges the parts.
    """
    gpu = Device.of(inputs.q.device)
    return feather(tiles=built_tiles(gpu.path, inputs.case.head_dim, gpu.shared_kb)[-1:])(inputs)


def _fa3(inputs: Inputs, planned: bool) -> Ready:
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata
    except ImportError as error:
        raise Unavailable(f"FlashAttention-3 of sgl-kernel does not import: {describe(error)}") from None
    if inputs.k.dtype == FP8:
        raise Unavailable("FlashAttention-3 takes a cache in fp8 with queries in fp8 only")
    case, q = inputs.case, inputs.q
    k, v = inputs.paged_kv
    steps = torch.arange(case.n_requests + 1, dtype=torch.int32, device=q.device)
    metadata = None
    if planned:
        metadata = get_scheduler_metadata(
            case.n_requests, 1, inputs.page_table.shape[1] * case.page_size, case.heads.query, case.heads.kv,
            case.head_dim, inputs.seq_lens, qkv_dtype=q.dtype, cu_seqlens_q=steps, page_size=case.page_size,
            causal=True,
        )  # fmt: skip
    out = torch.empty_like(q)

    def call() -> torch.Tensor:
        return flash_attn_with_kvcache(
            q, k, v, page_table=inputs.page_table, cache_seqlens=inputs.seq_lens, cu_seqlens_q=steps, max_seqlen_q=1,
            causal=True, scheduler_metadata=metadata, out=out,
        )  # fmt: skip

    return Ready(call)


def fa3(inputs: Inputs) -> Ready:
    """FlashAttention-3 over a page table, called as SGLang calls it."""
    return _fa3(inputs, planned=False)


def fa3_planned(inputs: Inputs) -> Ready:
    """The same with its tile scheduler's metadata computed ahead, which saves it a small kernel a call."""
    return _fa3(inputs, planned=True)


def triton(inputs: Inputs) -> Ready:
    """SGLang's decode in Triton, by its own splits."""
    try:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    except ImportError as error:
        raise Unavailable(f"SGLang's Triton decode does not import: {describe(error)}") from None
    case, q, device = inputs.case, inputs.q, inputs.q.device
    lens = inputs.seq_lens.long()
    indptr = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int()
    rows = torch.from_numpy(case.forest.row_offset).to(device)
    padded = padded_slots(inputs.table, rows, lens, case.page_size, int(lens.max()))
    slots = padded[torch.arange(padded.shape[1], device=device) < lens[:, None]].int()
    splits = torch.empty(case.n_requests, dtype=torch.int32, device=device)
    get_num_kv_splits_triton[(1,)](
        splits, inputs.seq_lens, case.n_requests, 1, case.heads.query, case.heads.kv, TRITON_SPLITS,
        torch.cuda.get_device_properties(device).multi_processor_count,
        MAX_NUM_SEQ=max(256, 1 << (case.n_requests - 1).bit_length()),
    )  # fmt: skip
    shape = (case.n_requests, case.heads.query, TRITON_SPLITS)
    parts = torch.empty(*shape, case.head_dim, dtype=torch.float32, device=device)
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    out = torch.empty_like(q)

    def call() -> torch.Tensor:
        decode_attention_fwd(
            q, inputs.k, inputs.v, out, indptr, slots, parts, sums, splits, TRITON_SPLITS, case.head_dim**-0.5,
            *inputs.scales,
        )  # fmt: skip
        return out

    return Ready(call)


def trtllm_mha(inputs: Inputs) -> Ready:
    """The decode of TensorRT-LLM (on Hopper: XQA) in FlashInfer, called as SGLang calls it."""
    try:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
    except ImportError as error:
        raise Unavailable(f"TensorRT-LLM's decode of FlashInfer does not import: {describe(error)}") from None
    case, q = inputs.case, inputs.q
    if case.page_size not in (16, 32, 64, 128):
        raise Unavailable("TensorRT-LLM's decode takes pages of 16, 32, 64 or 128")
    k, v = (cache.permute(0, 2, 1, 3) for cache in inputs.paged_kv)
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device)
    longest, (k_scale, v_scale) = inputs.page_table.shape[1] * case.page_size, inputs.scales

    def call() -> torch.Tensor:
        return trtllm_batch_decode_with_kv_cache(
            query=q, kv_cache=(k, v), workspace_buffer=workspace, block_tables=inputs.page_table,
            seq_lens=inputs.seq_lens, max_seq_len=longest, bmm1_scale=k_scale * case.head_dim**-0.5, bmm2_scale=v_scale,
            window_left=-1, out_dtype=q.dtype,
        )  # fmt: skip

    return Ready(call)


def hpc_ops(inputs: Inputs) -> Ready:
    """Tencent's HPC-Ops, called as SGLang calls it."""
    try:
        import hpc
    except ImportError as error:
        raise Unavailable(f"HPC-Ops does not import: {describe(error)}") from None
    case, q = inputs.case, inputs.q
    if (case.page_size, case.head_dim, q.dtype, inputs.k.dtype) != (64, 128, torch.bfloat16, torch.bfloat16):
        raise Unavailable("HPC-Ops takes pages of 64, a head_dim of 128 and bfloat16")
    k, v = inputs.paged_kv

    def call() -> torch.Tensor:
        return hpc.attention_decode_bf16(
            q, k, v, inputs.page_table, inputs.seq_lens, mtp=0, new_kv_included=True, splitk=True
        )

    return Ready(call)


class FlashInfer:
    """FlashInfer's decode on tensor cores and its cascade; both use one workspace, as their runs do not overlap.

    Both compile a module at first use where none is prebuilt (two minutes of one core).

    Parameters
    ----------
    cascade_backend : {"fa2", "fa3", "auto"}
        FlashInfer's prefill kernels under the cascade. The wrapper itself takes "auto", on Hopper "fa3", made for long
        queries; the level with one query row a request is why "fa2" is the default here.
    """

    def __init__(self, cascade_backend: str = "fa2") -> None:
        self.cascade_backend = cascade_backend
        self._workspace: torch.Tensor | None = None

    def decode(self, inputs: Inputs) -> Ready:
        """``BatchDecodeWithPagedKVCacheWrapper`` with ``use_tensor_cores``."""
        flashinfer = self._import()
        case = inputs.case
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._memory(inputs), "NHD", use_tensor_cores=True)
        indptr, indices, last = (torch.from_numpy(part) for part in case.paged)
        wrapper.plan(
            indptr, indices.to(inputs.q.device), last, case.heads.query, case.heads.kv, case.head_dim, case.page_size,
            q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype,
        )  # fmt: skip
        out, paged_kv = torch.empty_like(inputs.q), inputs.paged_kv
        k_scale, v_scale = inputs.scales if inputs.k.dtype == FP8 else (None, None)
        return Ready(
            lambda: wrapper.run(inputs.q, paged_kv, out=out, k_scale=k_scale, v_scale=v_scale), wrapper=wrapper
        )

    def cascade(self, inputs: Inputs) -> Ready:
        """``MultiLevelCascadeAttentionWrapper``: the run that all share, then each request's rest."""
        case, device = inputs.case, inputs.q.device
        if inputs.k.dtype == FP8:
            raise Unavailable("the cascade is not tried with a cache in fp8")
        if case.levels is None:
            raise Unavailable("no run of KV that all requests share")
        flashinfer = self._import()
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, self._memory(inputs), "NHD")
        for level in wrapper._batch_prefill_wrappers:
            level._backend = self.cascade_backend  # the wrapper has no argument for it
        paged = case.levels.paged
        wrapper.plan(
            [torch.from_numpy(rows).to(device) for rows in case.levels.qo_indptr],
            [torch.from_numpy(level.indptr).to(device) for level in paged],
            [torch.from_numpy(level.indices).to(device) for level in paged],
            [torch.from_numpy(level.last_page_len).to(device) for level in paged],
            case.heads.query, case.heads.kv, case.head_dim, case.page_size, q_data_type=inputs.q.dtype,
        )  # fmt: skip
        paged_kv = inputs.paged_kv
        return Ready(lambda: wrapper.run(inputs.q, paged_kv), wrapper=wrapper)

    def _import(self) -> Any:
        try:
            import flashinfer
        except ImportError as error:
            raise Unavailable(f"FlashInfer does not import: {describe(error)}") from None
        return flashinfer

    def _memory(self, inputs: Inputs) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
        return self._workspace


SGLANG = ("fa3", "flashinfer", "triton", "trtllm_mha", "hpc_ops")  # what its user can choose on Hopper
PEERS = ("fa3", "fa3-planned", "flashinfer", "cascade")
ABLATIONS: dict[str, System] = {
    "feather-naive": feather(strategy="naive"),
    "feather-profit": feather(strategy="profit"),
    "feather-compute": feather(strategy="compute"),
    "feather-two-phase": feather(strategy="two-phase"),
    "feather-optimal": feather(strategy="optimal"),
    "feather-query": feather(strategy="query"),
    "feather-balanced": feather(split="balanced"),
    "feather-fixed": feather_fixed,
    "feather-merge-kernel": feather(merge="kernel"),
    "feather-streams": feather(launch="streams"),
    "feather-serial": feather(launch="serial"),
    "feather-prefetch": feather(prefetch=True),
    "feather-portable": feather(path="portable"),
}
GROUPS = {
    "peers": (*PEERS, "feather"),
    "ablations": ("feather", *ABLATIONS),
    "all": (*PEERS, "feather", *ABLATIONS),
    "sglang": (*SGLANG, "feather"),
    "fp8": ("flashinfer", "triton", "feather", "feather-16bit"),
}


def is_peer(name: str) -> bool:
    return name in PEERS + SGLANG


def choose_systems(text: str, cascade_backend: str = "fa2") -> dict[str, System]:
    """Systems by name, separated by commas; a group's name stands for its members.

    ``feather:strategy=compute+split=mean`` is this package with any arguments of its wrapper.

    Raises
    ------
    ValueError
        An unknown name, or arguments that are not ``name=value``.
    """
    flashinfer = FlashInfer(cascade_backend)
    known: dict[str, System] = {
        "fa3": fa3, "fa3-planned": fa3_planned, "flashinfer": flashinfer.decode, "cascade": flashinfer.cascade,
        "triton": triton, "trtllm_mha": trtllm_mha, "hpc_ops": hpc_ops,
        "feather": feather(), "feather-16bit": feather(wide=True), **ABLATIONS,
    }  # fmt: skip
    chosen: dict[str, System] = {}
    for name in _split(text):
        for member in GROUPS.get(name, (name,)):
            if member.startswith("feather:"):
                chosen[member] = feather(**_options(member.removeprefix("feather:")))
            elif member in known:
                chosen[member] = known[member]
            else:
                names = ", ".join([*GROUPS, *known])
                raise ValueError(f"system {member!r}: use one of {names}, or feather:name=value+...")
    return chosen


def systems_on_gpu(text: str, *cascade_backend: str) -> dict[str, System]:
    """`choose_systems` for a benchmark that measures; ends the program in one line where it cannot."""
    try:
        chosen = choose_systems(text, *cascade_backend)
    except ValueError as error:
        raise SystemExit(f"--systems: {error}") from None
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark measures a GPU (--from reports a finished run without one)")
    return chosen


def _split(text: str) -> list[str]:
    """Names at the commas outside brackets, so that an argument may be a tuple."""
    names, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return names


def _options(text: str) -> dict[str, Any]:
    options = {}
    for part in text.split("+"):
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"feather:{text}: {part!r} is not name=value")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def describe(error: BaseException) -> str:
    """An error's first line, without the paths and traces that some libraries append."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:160]
