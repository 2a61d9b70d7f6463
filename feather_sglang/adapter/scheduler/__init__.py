"""A feather policy in charge of one SGLang scheduler.

May import: SGLang, scheduling, the rest of the adapter.
"""
