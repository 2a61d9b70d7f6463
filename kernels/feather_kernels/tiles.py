"""The tile shapes (m query rows, n KV tokens) that the kernels are built with, and the classes that run them."""

from __future__ import annotations
import os
TILES = ((16, 16), (32, 32), (64, 32), (128, 32)) if os.environ.get("W8") else ((16, 16), (32, 32), (64, 32))  # ascending m; csrc/packed_decode.cu lists the same, largest first
