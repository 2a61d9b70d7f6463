"""A live server's requests as a trace: who finished, what is kept of it, and the files.

May import: sglang, errors, adapter.
"""
