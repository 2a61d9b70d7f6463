"""Who is admitted next: a gate, an order, and rules; ``admission.py`` is the page to read first.

May import: scheduling.tree, scheduling.policies, scheduling.meters.
"""
