"""A feather policy in charge of one SGLang scheduler.

May import: sglang, torch, errors, slo, adapter, scheduling.
"""
