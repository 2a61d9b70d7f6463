"""Tables, summaries and plots of what was measured, whoever measured it.

May import: errors, file_writing.
"""
