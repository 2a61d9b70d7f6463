"""Traces replayed in virtual time: workloads, step times, jobs, training.

May import: ending, errors, slo, file_writing, report, scheduling, adapter, attention, feather_kernels, simulation.
"""
