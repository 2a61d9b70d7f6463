"""The result files of a comparison: their common head, and what happens to those of an earlier one."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from feather_sglang import __version__
from feather_sglang.adapter.environment import sglang_variables
from feather_sglang.errors import FeatherError
from feather_sglang.replay.traces import Trace
from feather_sglang.report.summary import RESULTS_VERSION

RESULTS = "results.json"
PLOTS = ("throughput.png", "batch_size.png", "latency.png")


def facts_of(trace: Trace) -> dict[str, Any]:
    """What results say first, of whichever engine."""
    return {
        "version": RESULTS_VERSION,
        "command": shlex.join(["feather", *sys.argv[1:]]),
        "feather": __version__,
        "environment": sglang_variables(),
        "workload": {"name": trace.name, "requests": len(trace.requests), "block_size": trace.block_size},
    }


def remove_earlier(target: Path, out: Path, overwrite: bool) -> None:
    """Remove an earlier comparison from its folder: the results, `target`, plots and logs.

    Raises ``FeatherError`` if nobody asked for that.
    """
    if not target.is_file():
        return
    if not overwrite:
        raise FeatherError(f"{target} is an earlier run's: give --overwrite, or another folder by --out")
    for path in (*_logs(target, out), *(out / plot for plot in PLOTS if (out / plot).is_file()), target):
        path.unlink(missing_ok=True)


def _logs(target: Path, out: Path) -> list[Path]:
    """The logs of the runs that results name; none where they cannot be read."""
    try:
        content = json.loads(target.read_bytes())
        labels = [Path(label).name for label in (*content.get("runs", ()), *content.get("failed", ()))]
        servers = [Path(record["log"]).name for record in content.get("records", ()) if record.get("log")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [*(out / f"{label}.log" for label in labels), *(out / "logs" / name for name in servers)]
