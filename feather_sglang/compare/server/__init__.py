"""Real SGLang servers, started and driven from outside: nothing here imports SGLang or torch.

May import: ending, errors, slo, file_writing, report, scheduling, adapter, replay.
"""
