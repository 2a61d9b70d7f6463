"""Which requests run together; knows no engine.

May import: errors, file_writing.
"""
