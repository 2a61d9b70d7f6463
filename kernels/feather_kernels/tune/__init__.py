"""Tile shapes that a GPU can run well, from its limits and measurements on it (PAT 5.2). Nothing else imports it.

``python -m feather_kernels.tune`` prints PAT's constraints (`solver`); ``--measure`` first measures the GPU's memory
(`memory_probe`), ``--profile`` the rule for n (`timing`, `selector`); both keep the result in the GPU's profile.
"""
