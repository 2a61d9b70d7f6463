"""Recorded decode batches, and how they are explained and drawn.

May import: feather_kernels, errors.
"""
