"""The time of a replayed server: its clients, its host, its GPU; knows no engine and no model.

May import: nothing.
"""
