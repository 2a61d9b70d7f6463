"""How much prefill may run between two tokens of a request.

May import: errors, slo, scheduling.meters.
"""
