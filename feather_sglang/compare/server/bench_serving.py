"""Results of ``sglang.bench_serving``, as columns beside our own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from feather_sglang.errors import FeatherError
from feather_sglang.report.summary import RunSummary


def read_results(path: Path) -> list[RunSummary]:
    """Read an ``--output-file``: one JSON object a run; a run is named by its ``--tag``, or after the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FeatherError(f"--bench-serving {path}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FeatherError(f"--bench-serving {path}: not UTF-8") from None
    found: dict[str, RunSummary] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"--bench-serving {path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise FeatherError(f"{where}: not JSON; give the --output-file of sglang.bench_serving") from None
        name = tag = str((row.get("tag") if isinstance(row, dict) else None) or path.stem)
        count = 1
        while name in found:
            count += 1
            name = f"{tag} #{count}"
        found[name] = _summary(row, name, where)
    if not found:
        raise FeatherError(f"--bench-serving {path}: holds no result")
    return list(found.values())


def _summary(row: Any, name: str, where: str) -> RunSummary:
    rate = _number(row, "output_throughput") if isinstance(row, dict) else None
    if rate is None:
        raise FeatherError(f"{where}: has no output_throughput; give the --output-file of sglang.bench_serving")
    streamed = _number(row, "mean_itl_ms")  # without streaming it is 0: neither gaps nor first tokens were seen
    waits, report = row.get("ttfts") or [], row.get("cache_report") or {}  # with --output-details, --cache-report
    if not isinstance(waits, list) or any(_finite(wait) is None for wait in waits):
        raise FeatherError(f"{where}: ttfts are no list of numbers; give the --output-file of sglang.bench_serving")
    if not isinstance(report, dict):
        raise FeatherError(f"{where}: cache_report is no object; give the --output-file of sglang.bench_serving")
    hit = _number(report, "cache_hit_rate_pct", 0.01)

    def seen(key: str, scale: float = 1.0) -> float | None:
        return _number(row, key, scale) if streamed else None

    return RunSummary(
        policy=name,
        requests=int(_number(row, "completed") or 0),
        output_tok_s=rate,
        ttft_mean=seen("mean_ttft_ms", 1e-3),
        ttft_p50=seen("median_ttft_ms", 1e-3),
        ttft_p99=seen("p99_ttft_ms", 1e-3),
        tbt_mean_ms=seen("mean_itl_ms"),
        tbt_p50_ms=seen("median_itl_ms"),
        tbt_p99_ms=seen("p99_itl_ms"),
        e2e_mean=_number(row, "mean_e2e_latency_ms", 1e-3),
        e2e_p50=_number(row, "median_e2e_latency_ms", 1e-3),
        e2e_p99=_number(row, "p99_e2e_latency_ms", 1e-3),
        cache_hit=hit,
        max_wait=max(waits) if waits and streamed else None,
        makespan=_number(row, "duration"),
    )


def _number(row: dict[str, Any], key: str, scale: float = 1.0) -> float | None:
    """A finite number of the row, times `scale`."""
    value = _finite(row.get(key))
    return None if value is None else value * scale


def _finite(value: Any) -> float | None:
    """A number that can be counted with; None for anything else, be it an integer beyond all floats."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
