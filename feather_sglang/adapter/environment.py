"""The environment variables that SGLang reads, and whether they let it load this plugin.

SGLang is not imported.
"""

from __future__ import annotations

import os
from importlib import metadata

from feather_sglang.errors import FeatherError, quoted

PREFIXES = ("SGLANG_", "SGL_", "IN_BATCH_")  # SGLang takes SGL_ for an older spelling of SGLANG_
DISABLE = "FEATHER_DISABLE"


def sglang_variables() -> dict[str, str]:
    """SGLang's variables that are set: what a run gives depends on them as it does on flags."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def disabled() -> bool:
    """Whether a server is to start without feather, whatever its flags say."""
    return os.environ.get(DISABLE, "").lower() in ("1", "true", "on")


def why_inactive() -> str | None:
    """Why an SGLang that starts here would not load the plugin; None where it does."""
    if not any(entry.name == "feather" for entry in metadata.entry_points(group="sglang.srt.plugins")):
        return "the plugin is not registered; install feather-sglang with pip"
    if disabled():
        return f"{DISABLE}={os.environ[DISABLE]} turns it off; unset it"
    named = os.environ.get("SGLANG_PLUGINS", "")
    allowed = [name.strip() for name in named.split(",") if name.strip()]
    if allowed and "feather" not in allowed:
        return f"SGLANG_PLUGINS={quoted(named)} leaves feather out; add it"
    return None


def require_plugin() -> None:
    """Raise ``FeatherError`` where SGLang would not load the plugin, before anything runs that needs it."""
    if reason := why_inactive():
        raise FeatherError(reason)


def check_output_limit(name: str, tokens: int) -> None:
    """Raise ``FeatherError`` where SGLang would cut an answer of so many tokens, of the trace of that name."""
    limit = os.environ.get("SGLANG_MAX_NEW_TOKENS_LIMIT", "")
    if limit.isdecimal() and 0 < int(limit) < tokens:
        raise FeatherError(f"SGLANG_MAX_NEW_TOKENS_LIMIT={limit}: an answer in {name} has {tokens} tokens; unset it")
