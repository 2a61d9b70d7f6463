"""The pat decode attention backend.

May import: SGLang, torch, feather_kernels, attention, plans.
"""
