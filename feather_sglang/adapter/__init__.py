"""Everything that touches SGLang; no other package of feather imports it.

May import: SGLang, torch, scheduling, attention, plans, feather_kernels.
"""
