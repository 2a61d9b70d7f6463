"""Tables, summaries and plots of runs, replayed or on servers.

May import: errors, slo, file_writing.
"""
