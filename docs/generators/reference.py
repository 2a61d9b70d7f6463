"""Write the reference pages of flags and metrics from the code that defines them.

    python docs/generators/reference.py [--check]

``--check`` writes nothing and exits 1 if a page differs from what the code says.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from feather_sglang.adapter.options import FeatherOptions, add_flags
from feather_sglang.cli import COMMANDS

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
METRICS = ("Counter", "Gauge", "Histogram")
SKIPPED = ("==SUPPRESS==", None)


def cell(text: str) -> str:
    """Text as one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; the cells are Markdown already."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def argument_rows(parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    """(flag with its value, meaning) of each argument of a parser."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help in SKIPPED:
            continue
        value = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        )
        name = action.option_strings[-1] if action.option_strings else ""
        value = str(value) if name else action.dest
        shown = value if not name else name if action.nargs == 0 else f"{name} {value}"
        text = action.help % {**vars(action), "prog": parser.prog}
        rows.append((f"`{cell(shown)}`", cell(text)))
    return rows


def server_rows() -> list[tuple[str, ...]]:
    """(flag with its value, key in FEATHER_OPTIONS, meaning) of each option of a server."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = {action.dest: action for action in parser._actions}
    rows = []
    for spec in fields(FeatherOptions):
        action = flags[f"feather_{spec.name}"]
        rows.append((f"`{cell(f'{action.option_strings[0]} {action.metavar}')}`", cell(action.help or "")))
    return rows


def command_parsers() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """(command, summary, its parser) of ``feather``, as the command line makes them."""
    for name, (path, summary) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"feather {name}")
        importlib.import_module(path).add_arguments(parser)
        yield from leaves(f"feather {name}", summary, parser)


def leaves(
    name: str, summary: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The parser itself, or those of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, sub in action.choices.items():
                yield from leaves(f"{name} {word}", texts.get(word, summary), sub)
            return
    yield name, summary, parser


def flags_page() -> str:
    """The page of all flags."""
    parts = [
        "# Which flags are there",
        "",
        "Generated from the parsers themselves by `python docs/generators/reference.py`.",
        "",
        "## Of a server",
        "",
        "`python -m sglang.launch_server` and `sglang serve` take these; they matter once a feather policy or `pat` is "
        "named. `sglang.Engine` reads the same options from the environment variable `FEATHER_OPTIONS`, a JSON object "
        'with underscores for dashes: `{"max_wait": 60}`.',
        "",
        table(("flag", "meaning"), server_rows()),
    ]
    shown: dict[tuple[str, ...], str] = {}  # row -> the command that has it first
    for name, summary, parser in command_parsers():
        parts += ["", f"## `{name}`", "", f"{summary[0].upper()}{summary[1:].rstrip('.')}."]
        rows = argument_rows(parser)
        if same := [row[0] for row in rows if shown.get(row) == "feather ab"]:
            rows = [row for row in rows if row[0] not in same]
            parts += ["", f"As `feather ab`: {', '.join(same)}."]
        shown.update((row, name) for row in rows if row not in shown)
        if rows:
            parts += ["", table(("argument", "meaning"), rows)]
    return "\n".join(parts) + "\n"


def metrics_in(source: str) -> Iterator[tuple[str, str, str]]:
    """(name as scraped, kind, help) of each metric that a module makes with literal arguments."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in METRICS or len(node.args) < 2:
            continue
        name, text = (ast.literal_eval(argument) for argument in node.args[:2])
        kind = node.func.id.lower()
        yield (f"{name}_total" if kind == "counter" else name), kind, text


def metrics_page() -> str:
    """The page of all metrics."""
    found = [row for path in sorted((ROOT / "feather_sglang").rglob("*.py")) for row in metrics_in(path.read_text())]
    rows = [(f"`{name}`", kind, cell(text)) for name, kind, text in sorted(found)]
    return (
        "\n".join(
            [
                "# Which metrics are there",
                "",
                "In SGLang's own `/metrics`, beside the `sglang:*` ones, with `--enable-metrics`. The first rank "
                "counts for all.",
                "",
                table(("metric", "kind", "meaning"), rows),
                "",
                "`feather_pat_read_tokens_total` over `feather_pat_attended_tokens_total` is the share of KV reads "
                "that packing left: 1 where nothing is shared. Alert on any increase of "
                "`feather_policy_failures_total`: the scheduler goes on as fcfs, and the log has the reason.",
                "",
                "Queue length, time to first token and cache hits are SGLang's own metrics and mean what they mean "
                "without the plugin.",
            ]
        )
        + "\n"
    )


PAGES = {"reference/flags.md": flags_page, "reference/metrics.md": metrics_page}


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if check and (not path.is_file() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        print(f"docs/{', docs/'.join(stale)}: not what the code says; run python docs/generators/reference.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
