"""One batch through the packed kernel on this machine's GPU, beside attention from the definition."""

from __future__ import annotations

import time

import torch

from feather_kernels.errors import BuildError
from feather_kernels.forest import Forest
from feather_kernels.reference import direct_decode
from feather_kernels.reference_engine import to_numpy
from feather_kernels.wrapper import PackedDecodeWrapper

HEADS, KV_HEADS, DIM = 32, 8, 128
PREFIX, TAILS = 700, (1, 40, 333, 64, 900, 5)


def self_test() -> str:
    """Decode requests in two prefix groups in bfloat16; what came out, in words.

    Raises ``BuildError`` where the kernel cannot be built or loaded, or computes something else.
    """
    start = time.perf_counter()
    wrapper = PackedDecodeWrapper(HEADS, KV_HEADS, DIM, dtype=torch.bfloat16, max_requests=len(TAILS))
    built = time.perf_counter()
    generator = torch.Generator("cuda").manual_seed(0)
    lens = [PREFIX + tail for tail in TAILS]
    slots = torch.randperm(2 * PREFIX + sum(TAILS), generator=generator, device="cuda").to(torch.int32)
    table = torch.zeros(len(lens), max(lens), dtype=torch.int32, device="cuda")
    used = 2 * PREFIX
    for row, tail in enumerate(TAILS):
        group = row % 2
        table[row, :PREFIX] = slots[group * PREFIX : (group + 1) * PREFIX]
        table[row, PREFIX : PREFIX + tail] = slots[used : used + tail]
        used += tail

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    q, k, v = random(len(lens), HEADS, DIM), random(len(slots), KV_HEADS, DIM), random(len(slots), KV_HEADS, DIM)
    forest = Forest.from_block_table(to_numpy(table), lens, page_size=1)
    wrapper.plan(forest, table)
    out = wrapper.run(q, k, v)
    assert isinstance(out, torch.Tensor)
    exact, _ = direct_decode(forest, to_numpy(q), to_numpy(k), to_numpy(v), to_numpy(table).ravel(), 1)
    worst = float(abs(to_numpy(out) - exact).max())
    if not worst < 0.02:  # results are sums of about 0.1, rounded to 8 bits
        raise BuildError(f"the packed kernel's result is {worst:.3g} away from attention: report this GPU")
    now = time.perf_counter()
    return (
        f"can serve here ({wrapper.config.path} path, {forest.n_nodes} shared nodes, largest error {worst:.1e}; loaded "
        f"in {built - start:.1f} s, tested in {now - built:.1f} s)"
    )
