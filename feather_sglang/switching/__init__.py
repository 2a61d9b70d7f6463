"""``feather switch``: another policy for a running server, judged by the server's own metrics and taken back if worse.

May import: errors, scheduling, adapter.
"""
