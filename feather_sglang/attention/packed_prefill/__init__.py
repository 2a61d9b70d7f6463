"""Shared prefixes of prompts in a radix tree, and whether packing their prefill pays; knows no engine.

May import: feather_kernels, attention.
"""
