"""One comparison of policies, two engines: replay and real servers; one report.

May import: ending, errors, slo, file_writing, report, scheduling, adapter, replay.
"""
