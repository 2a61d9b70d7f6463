"""The operator's files: every promise names a test that exists, and every query a metric that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from operations import FOLDER, alerts, dashboard, queried_metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "operations.md").read_text()


def test_every_promise_names_a_test_that_exists() -> None:
    promises = PAGE.partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("|")][2:]
    named = [re.fullmatch(r"\| .+ \| `(tests/\S+\.py)::(test_\w+)` \|", row) for row in rows]
    assert len(named) > 10 and all(named)
    for file, function in (name.groups() for name in named if name):
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, function)


def test_every_query_is_of_a_metric_on_the_reference_page() -> None:
    """That a server has them is seen in tests/server."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for name in queried_metrics():
        if name.startswith("feather_"):
            assert f"|`{name.removesuffix('_bucket')}`|" in page, name


def test_alerts_say_what_to_do_and_are_explained() -> None:
    for rule in alerts():
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        said = rule["annotations"]
        assert set(said) == {"summary", "action"} and "{{ $labels.instance }}" in said["summary"]
        assert "by (instance)" in rule["expr"] and f"| `{rule['alert']}` |" in PAGE


def test_no_panel_lies_over_another() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for place in (panel["gridPos"] for panel in panels):
        (x, y), (w, h) = (place["x"], place["y"]), (place["w"], place["h"])
        cells = {(x + right, y + down) for right in range(w) for down in range(h)}
        assert not cells & taken and x + w <= 24
        taken |= cells


def test_the_containers_are_given_files_that_are_there() -> None:
    services = yaml.safe_load((FOLDER / "compose.yml").read_text())["services"]
    mounted = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    assert len(mounted) == 5 and all((FOLDER / source).exists() and mode == "ro" for source, _, mode in mounted)
    rules = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    assert {target for source, target, _ in mounted if source.endswith("alerts.yml")} == set(rules)
