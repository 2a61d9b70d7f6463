"""Scheduling: which requests run together; knows no engine.

May import: errors, slo, file_writing.
"""
