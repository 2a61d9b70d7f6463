"""Traces replayed in virtual time: workloads, step times, jobs, training.

May import: errors, file_writing, report, scheduling, adapter.
"""
