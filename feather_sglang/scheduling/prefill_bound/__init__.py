"""The bound on prefill between two tokens of a request.

May import: errors, slo, scheduling.meters.
"""
