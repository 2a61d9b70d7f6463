"""Who is admitted next: when a round opens, in which order, and who waits for what.

May import: scheduling.tree, scheduling.policies.
"""
