"""Change of the schedule policy while the server runs.

May import: sglang, errors, adapter, scheduling.
"""
