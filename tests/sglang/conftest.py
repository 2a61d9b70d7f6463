"""Tests against the installed SGLang, whatever supported release that is."""

import importlib.util

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs an installed SGLang", allow_module_level=True)

from feather_sglang.adapter import cpu_shims

cpu_shims.install()
