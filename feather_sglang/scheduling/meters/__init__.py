"""What a decode step and a prefill token take, measured while serving.

May import: nothing but itself.
"""
