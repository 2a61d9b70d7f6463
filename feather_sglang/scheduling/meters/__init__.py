"""Meters of decode steps and prefill tokens, measured while serving.

May import: nothing but itself.
"""
