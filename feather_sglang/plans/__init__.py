"""Recorded decode batches, and how they are explained and drawn.

May import: errors, report, feather_kernels.
"""
