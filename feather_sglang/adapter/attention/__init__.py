"""The pat decode attention backend.

May import: sglang, torch, errors, adapter, attention, plans, feather_kernels.
"""
