"""Prefill by the packed kernel (``--feather-pat-prefill``): imported where it is asked for, and nowhere else.

To drop it, delete this package, ``attention/packed_prefill``, ``replay/packed_prefill.py`` with the argument of
`StepTimeModel`, `prompt_block` and `PROMPT_LEVELS` in ``attention/new_tokens.py``, and the option ``pat_prefill``.
The calls of `packs_prefill` are the seam: in `create_backend`, `refuse_arguments`, two rows of `PAT_FLAGS` and the
refusal beside latent attention. Two rows of `HOOKS` and one of `MODES` name it.

May import: sglang, torch, errors, adapter, attention, feather_kernels.
"""
