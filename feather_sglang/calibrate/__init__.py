"""``feather calibrate``: a hardware profile of this machine, from SGLang's own steps.

May import: ending, errors, slo, file_writing, report, scheduling, adapter, replay, compare, simulation.
"""
