"""Everything that touches SGLang; no other package of feather imports it.

May import: sglang, torch, errors, scheduling, attention, plans, feather_kernels.
"""
