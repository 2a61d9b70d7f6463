"""Change of the schedule policy while the server runs.

May import: SGLang, the scheduler of the adapter.
"""
