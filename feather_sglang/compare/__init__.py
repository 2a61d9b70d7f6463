"""One comparison of policies, two engines: replay and real servers; one report.

May import: everything below it; nobody imports it but the command line.
"""
