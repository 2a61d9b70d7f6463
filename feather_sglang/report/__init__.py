"""Tables, summaries and plots of what was measured, whoever measured it.

May import: errors, slo, file_writing.
"""
