"""Stands in for SGLang where only a server's processes matter; first on PYTHONPATH."""
