"""The ``feather`` command.

Every subcommand is one module with ``add_arguments(parser)`` and ``run(args) -> int``; it is imported only
when it is asked for, so ``feather --help`` needs neither SGLang nor torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any

from feather_sglang import __version__, ending
from feather_sglang.errors import FeatherError

COMMANDS = {
    "ab": ("feather_sglang.compare.ab", "run a trace under several scheduling policies, replayed or on real servers"),
    "suite": ("feather_sglang.suite.command", "replay every kind of traffic under every policy, into one report"),
    "train": ("feather_sglang.replay.train", "train a stop policy on a trace and write its policy file"),
    "calibrate": ("feather_sglang.calibrate.command", "measure this machine's GPU and host, and write their profile"),
    "trace": ("feather_sglang.replay.trace_cli", "make or inspect a request trace"),
    "explain-plan": ("feather_kernels.plans.cli", "draw the forest, the packs and the work items of a decode batch"),
    "switch": (
        "feather_sglang.switching.command",
        "change the policy of a running server, and go back where its metrics get worse",
    ),
    "patch": (
        "feather_sglang.patching.cli",
        "put SGLang's extension points into an installed release, or take them out",
    ),
    "doctor": ("feather_sglang.adapter.doctor", "show what this installation has and whether feather is active"),
}


def print_anything() -> None:
    """Print as escapes what the encoding of an output lacks: names of files and models may have any letters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``feather`` command and return its exit status (2 for a user's mistake)."""
    print_anything()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="feather", description="Prefix-aware scheduling for SGLang.")
    parser.add_argument("--version", action="version", version=f"feather-sglang {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if word in COMMANDS), None)
    module: Any = None
    try:
        for name, (path, summary) in COMMANDS.items():
            sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
            if name == chosen:
                module = importlib.import_module(path)
                module.add_arguments(sub)
        args = parser.parse_args(argv)
        with ending.on_signals():
            return int(module.run(args) or 0)
    except FeatherError as error:
        print(f"feather: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except OSError as error:  # a full disk, a folder that cannot be written to
        print(f"feather: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("feather: interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:
        if signal := ending.name_of(end.code):
            print(f"feather: ended by {signal}", file=sys.stderr)
        raise


if __name__ == "__main__":
    sys.exit(main())
