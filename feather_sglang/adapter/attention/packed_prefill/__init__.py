"""Prefill by the packed kernel (``--feather-pat-prefill``): imported where it is asked for, and nowhere else.

May import: sglang, torch, errors, adapter, attention, feather_kernels.
"""
