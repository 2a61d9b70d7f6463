"""Extension points for an installed SGLang: the series of ``patches/``, applied and taken back.

May import: errors.
"""
