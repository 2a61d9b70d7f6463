"""A model's tokenizer, loaded as SGLang loads it: by the package transformers."""

from __future__ import annotations

from typing import Any

from feather_sglang.errors import FeatherError


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, by the name or folder that ``--tokenizer`` gave."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise FeatherError(f"--tokenizer {name}: needs the package transformers") from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # it raises whatever its parts raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FeatherError(f"--tokenizer {name}: cannot be loaded: {reason}") from None
