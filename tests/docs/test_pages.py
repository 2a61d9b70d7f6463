"""Generated pages agree with the code; README's links resolve."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("program", ("reference.py", "figures.py"))
def test_generated_pages_are_what_their_generator_writes(program: str) -> None:
    checked = subprocess.run(
        [sys.executable, str(DOCS / "generators" / program), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_page_of_the_suite_is_what_its_results_give() -> None:
    import json

    from feather_sglang.suite.report import page

    results = json.loads((DOCS / "measured" / "suite.json").read_text())
    written = (DOCS / "lab" / "suite.md").read_text()
    assert written == page(results, "feather suite --show docs/measured/suite.json --page docs/lab/suite.md")


def test_every_option_of_the_server_has_its_row() -> None:
    from dataclasses import fields

    from feather_sglang.adapter.options import FeatherOptions, flag_of, has_flag

    page = (DOCS / "reference" / "flags.md").read_text()
    for spec in fields(FeatherOptions):
        assert f"|`{flag_of(spec.name)} " in page if has_flag(spec.name) else f"|`{spec.name}: " in page, spec.name


@pytest.mark.parametrize("name", ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert not [target for target in targets if not (ROOT / target).exists()]
