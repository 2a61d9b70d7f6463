"""Formats of traces and logs that ``feather trace import`` reads: one module each, and the list of them.

May import: errors, replay, adapter.
"""
