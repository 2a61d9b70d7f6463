"""A table from loads to modes, and its file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.modes.load import KEYS, Load
from feather_sglang.scheduling.modes.mode import Mode
from feather_sglang.scheduling.policies.policy_file import mapping, read_document, write_document

NAME = "modes"  # in policy files
SHIPPED = Path(__file__).with_name("shipped.json")


class ModePolicy:
    """Chooses a mode by the load.

    Parameters
    ----------
    table
        By the names of states (``KEYS``).
    default
        In a state that the table lacks.
    provenance
        What it was trained on: goes into the file.

    Attributes
    ----------
    visits
        Rounds in each state.
    """

    def __init__(self, table: Mapping[str, Mode], default: Mode, provenance: Mapping[str, Any] | None = None) -> None:
        if unknown := set(table) - set(KEYS):
            raise ValueError(f"no state is called {min(unknown)[:40]!r}")
        self.table, self.default = dict(table), default
        self.provenance = dict(provenance or {})
        self.visits: Counter[str] = Counter()

    def decide(self, load: Load) -> Mode:
        """Return the mode of a round."""
        key = load.key()
        self.visits[key] += 1
        return self.table.get(key, self.default)

    def document(self) -> dict[str, Any]:
        """What its file holds, beside the format."""
        table = {key: str(self.table[key]) for key in KEYS if key in self.table}
        return {"default": str(self.default), "table": table, "provenance": self.provenance}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy file, atomically."""
        write_document(path, NAME, self.document())

    @classmethod
    def load(cls, path: str | os.PathLike[str] = SHIPPED) -> ModePolicy:
        """Read a policy file; without a path, the one that ships with the package."""
        document = read_document(path)
        if document["policy"] != NAME:
            raise FeatherError(f"policy file {path} is for policy {document['policy']!r}, not {NAME!r}")
        try:
            table = {key: Mode.parse(str(text)) for key, text in mapping(document.get("table"), "table").items()}
            default = Mode.parse(str(document.get("default")))
            return cls(table, default, mapping(document.get("provenance"), "provenance"))
        except ValueError as error:
            raise FeatherError(f"policy file {path} is damaged: {error}") from error
