"""Traces replayed in virtual time: workloads, step times, jobs, training.

May import: the adapter (its engine), scheduling, report.
"""
