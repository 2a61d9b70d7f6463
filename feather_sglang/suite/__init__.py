"""``feather suite``: every policy on every kind of traffic that we know, by replay, in one report.

May import: ending, errors, slo, file_writing, report, scheduling, adapter, replay, compare.
"""
