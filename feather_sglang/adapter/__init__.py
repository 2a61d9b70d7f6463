"""Everything that touches SGLang; no other package of feather imports it.

A request comes in by ``scheduler/life_cycle.py`` and ``scheduler/rounds.py``; a decode step runs
``scheduler/row_order.py``, then ``attention/backend.py``, then ``scheduler/meters.py``.

May import: sglang, torch, errors, slo, scheduling, attention, feather_kernels, simulation.
"""
