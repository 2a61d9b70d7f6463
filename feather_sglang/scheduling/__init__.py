"""Which requests run together; knows no engine.

May import: nothing of feather but errors and file writing.
"""
