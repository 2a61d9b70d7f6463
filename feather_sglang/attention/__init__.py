"""The prefix forest of a running batch and its upkeep; knows no engine.

May import: feather_kernels.
"""
