"""Prefill by the packed kernel (``--feather-pat-prefill``): imported where it is asked for, and nowhere else.

Without it, ``attention/packed_prefill`` and the option ``pat_prefill`` go as well, and with that option
`packs_prefill`, whose callers are the seam: `create_backend`, `refuse_arguments` and two rows of `PAT_FLAGS`. The
replay predicts it in ``step_time.py``.

May import: sglang, torch, errors, adapter, attention, feather_kernels.
"""
