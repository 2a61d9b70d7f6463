"""A table from loads to modes, and its file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.modes.load import KEYS, Load
from feather_sglang.scheduling.modes.mode import Mode
from feather_sglang.scheduling.policies.policy_file import mapping, read_document, write_document

NAME = "modes"  # in policy files
ANY = "any"  # counts the rounds of a policy without a table
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
    rivals
        Modes that may be better on other traffic: a server tries them, if at all.

    Attributes
    ----------
    visits
        Rounds in each state.
    """

    def __init__(
        self,
        table: Mapping[str, Mode],
        default: Mode,
        provenance: Mapping[str, Any] | None = None,
        rivals: Sequence[Mode] = (),
    ) -> None:
        if unknown := set(table) - set(KEYS):
            raise ValueError(f"no state is called {min(unknown)[:40]!r}")
        self.table, self.default = dict(table), default
        self.provenance = dict(provenance or {})
        self.rivals = tuple(rivals)
        self.visits: Counter[str] = Counter()

    def decide(self, load: Load | None) -> Mode:
        """Return the mode of a round; without a table, the load does not matter."""
        key = ANY if load is None else load.key()
        self.visits[key] += 1
        return self.table.get(key, self.default)

    def document(self) -> dict[str, Any]:
        """What its file holds, beside the format."""
        table = {key: str(self.table[key]) for key in KEYS if key in self.table}
        rivals = [str(mode) for mode in self.rivals]
        return {"default": str(self.default), "table": table, "rivals": rivals, "provenance": self.provenance}

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
            rivals = document.get("rivals", [])
            if not isinstance(rivals, list):
                raise ValueError("rivals is no list")
            provenance = mapping(document.get("provenance"), "provenance")
            return cls(table, default, provenance, [Mode.parse(str(text)) for text in rivals])
        except ValueError as error:
            raise FeatherError(f"policy file {path} is damaged: {error}") from error
