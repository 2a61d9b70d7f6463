"""The tile shapes (m query rows, n KV tokens) that the kernels are built with."""

from __future__ import annotations

# By ascending m; csrc/packed_decode.cu lists the same, largest first.
TILES = {
    "portable": ((8, 16), (16, 16), (32, 32), (64, 32)),
    "hopper": ((8, 16), (16, 16), (64, 64)),
}
