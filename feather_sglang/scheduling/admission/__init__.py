"""Admission of waiting requests: a gate, an order, and rules; ``admission.py`` is the module to read first.

May import: scheduling.tree, scheduling.policies, scheduling.meters.
"""
