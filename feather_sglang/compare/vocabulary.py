"""The vocabulary of the model that servers load, from its folder: prompts are made of token ids."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from feather_sglang.compare.server.cases import fold
from feather_sglang.errors import FeatherError


def vocabulary_of(model: str) -> int:
    """How many tokens the model in that folder knows; ``FeatherError`` where it does not say."""
    path = Path(model) / "config.json"
    if not path.is_file():
        raise FeatherError(f"--model {model}: servers need the folder of a model; there is no {path}")
    try:
        config = json.loads(path.read_bytes())
        vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise FeatherError(f"{path}: not the configuration of a language model: no vocab_size") from None
    fold(array("q"), vocabulary)  # refuses one that is too small
    return vocabulary
