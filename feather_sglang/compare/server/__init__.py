"""Real SGLang servers, started and driven from outside: nothing here imports SGLang or torch.

May import: replay, report, and the options and ports of the adapter.
"""
