"""The pat decode attention backend.

A step runs through `backend`, `step_planner`, which plans it, and `engines`. What is not served stands in `limits` (of
a model and its layers) and in ``adapter/refusals.py`` (of a server's flags).

May import: sglang, torch, errors, adapter, attention, scheduling, feather_kernels.
"""
