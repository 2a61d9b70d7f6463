"""The Chunked Hash Tree: which waiting request shares most with the running batch.

May import: nothing but itself.
"""
