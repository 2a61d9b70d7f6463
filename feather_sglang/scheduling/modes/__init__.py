"""Modes: which rule ranks those who wait, when prefill may hold up decode, and when to STOP, chosen by the load.

A policy maps what the load looks like (``load.py``) to a mode (``mode.py``); what is aimed at are the operator's bounds
on the first token and between tokens (``promise.py``). Trained by ``feather learn``; the shipped table is data. Where
the operator allows it, a server tries other modes (``trials.py``) by what came of its requests (``outcomes.py``).

May import: errors, file_writing, slo, scheduling.policies.
"""
