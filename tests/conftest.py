"""Puts this folder on the import path, so that tests import their oracles as ``oracles.<name>``."""

from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow; that says nothing about the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
