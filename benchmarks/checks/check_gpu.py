"""Check whether a machine with a Hopper GPU serves as the performance page says; `python3 dev.py gpu` runs this.

    python3 dev.py gpu
    python3 dev.py gpu --compare OLD.json --out results/new.json

It needs an installed SGLang and takes less than ten minutes: the GPU's tests; a server with `pat` and `feather` whose
answers must be those of SGLang's own backend; then two servers, `fa3` with fcfs and `pat` with `feather`, under W6
(prefixes fill the KV pool), under W3 (nothing is shared) and for a lone request, the second one with `--feather-tbt` as
well, which must cost next to no throughput and shorten the gaps. The model has Qwen3-8B's shape and
random weights; it is written here, and nothing is downloaded.

A table has this machine's figures beside the performance page's, or beside those of ``--compare``. The result file is
whole after every part. What the parts print, and their servers, is kept in a folder beside it.

Exit status: 0; 1, and one line for each, where something is wrong, was not run, or with ``--compare`` is worse than in
the older file; 2 where there is no Hopper GPU or the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_found import NoHopper, hopper

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured"
LEAST = 120.0  # seconds; starting a server takes about 60

sys.path.insert(0, str(ROOT))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="dev.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"), metavar="FILE",
                        help="the result file (default: %(default)s)")  # fmt: skip
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="an older result file, than which ratios "
                        "to fa3 may be 5%% worse, and on the same GPU with the same SGLang tokens/s 10%%")  # fmt: skip
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for everything; what is "
                        "missing then is named (default: %(default)g)")  # fmt: skip
    options = parser.parse_args(argv)
    if not options.time_limit >= LEAST:
        parser.error(f"--time-limit {options.time_limit:g}: give at least {LEAST:g} seconds")
    if options.out.exists() and not options.out.is_file():
        parser.error(f"--out {options.out}: is no file; name another")
    if options.compare and not options.compare.is_file():
        parser.error(f"--compare {options.compare}: there is no such file")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Check, print the table, and judge."""
    options = arguments(argv)
    try:
        gpu = hopper()
    except NoHopper as reason:
        print(f"dev.py gpu: {reason}", file=sys.stderr)
        return 2
    # Only now: a machine that is refused, or asks for help, may lack what these need.
    import gpu_report
    from gpu_run import GpuRun

    try:
        older = gpu_report.read_older(options.compare) if options.compare else gpu_report.page_figures(MEASURED)
    except ValueError as reason:
        print(f"dev.py gpu: {reason}", file=sys.stderr)
        return 2
    content = GpuRun(options.out, options.time_limit, gpu).run()
    print(f"\n{gpu_report.report(content, older, is_page=options.compare is None)}\n\nwritten: {options.out}")
    failures = gpu_report.failures(content, older, is_page=options.compare is None)
    for failure in failures:
        print(f"FAILED {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
