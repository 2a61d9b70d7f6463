"""What a running batch shares: the upkeep of its prefix forest; knows no engine.

May import: feather_kernels.
"""
