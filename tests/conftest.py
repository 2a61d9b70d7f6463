"""Puts this folder on the import path, so that tests import their oracles as ``oracles.<name>``."""
