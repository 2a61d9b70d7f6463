"""The metrics that the files of docs/operations query."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "docs" / "operations"


def alerts() -> list[dict[str, Any]]:
    """The rules of the alerts."""
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Grafana's."""
    return dict(json.loads((FOLDER / "grafana" / "feather.json").read_text()))


def queries() -> list[str]:
    """Every PromQL expression."""
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    variables = [one["query"]["query"] for one in dashboard()["templating"]["list"] if isinstance(one["query"], dict)]
    return panels + variables + [rule["expr"] for rule in alerts()]


def queried_metrics() -> set[str]:
    """The series that they name."""
    return {name for query in queries() for name in re.findall(r"(?:feather_|sglang:)\w+", query)}
