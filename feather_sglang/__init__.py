"""Prefix-aware scheduling and attention for SGLang."""

__version__ = "0.1.0"
