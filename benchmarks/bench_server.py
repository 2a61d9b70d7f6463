"""Real SGLang servers on one GPU, driven over HTTP: attention backends and schedule policies side by side.

    PYTHONPATH=.:kernels python benchmarks/bench_server.py --model CONFIG_FOLDER --json server.json \\
        --server fa3 --server flashinfer --server pat --case decode:500,5,5000 --case W1

A server is a known name (``fa3``, ``flashinfer``, ``triton``, ``trtllm_mha``, ``hpc_ops``, ``pat``;
``fa3+feather-order`` adds a policy) or ``NAME=FLAGS``. Cases:
``W1`` .. ``W7`` and ``open:...`` send requests one by one as they arrive; ``decode:B,G,L``
measures the time in which a batch of B requests in G groups with L shared tokens decodes, and nothing else (the
docstrings of server_cases.py and feather_sglang/compare/server/cases.py have them all). The cache is flushed before
each case.

Servers run one after the other; one that does not come up, or ends, is left out. ``--repeat 2`` runs A B B A; with
``--overlap-starts N`` N servers start at once, before anything is measured, stay up and take turns case by case, if the
GPU's memory holds them all. With ``--one-server`` neighbours that differ in the policy and its options alone
(``paced=--schedule-policy feather --feather-pace 0.1``) are one server, which is switched before each case. The JSON
file is whole after every measurement; at ``--time-limit`` what is missing is named. ``--from server.json`` prints a
finished run again, several files as one: runs at the same time on GPUs of their own (``CUDA_VISIBLE_DEVICES``), say.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from finished import read_finished
from server_arguments import arguments, bench
from server_records import incomplete
from server_report import merged, rates, report

from feather_sglang import ending
from feather_sglang.errors import FeatherError
from feather_sglang.report.plots import new_axes, save


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read a finished run; print its report. The status is 1 where something is missing."""
    options = arguments(argv, __doc__)
    if options.source:
        try:
            content = merged([read_finished(path, "servers", "machine", "missing") for path in options.source])
        except ValueError as error:
            raise SystemExit(f"--from {' '.join(map(str, options.source))}: {error}") from None
        print(report(content))
    else:
        try:
            run = bench(options)
        except FeatherError as error:
            raise SystemExit(str(error)) from None
        content = run.content
        try:
            with ending.on_signals():
                run.run()
        finally:
            print(f"\n{report(content)}", flush=True)
    if options.plot and any("error" not in record for record in content["records"]):
        plot(rates(content["records"]), options.plot)
    return int(bool(content["missing"]) or any(map(incomplete, content["records"])))


def plot(by_server: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Bars of output tokens/s: a group a case, a bar a server."""
    cases = list(dict.fromkeys(case for of_server in by_server.values() for case in of_server))
    figure, axes = new_axes("Output throughput", "", "tokens/s")
    figure.set_size_inches(min(12.0, 2 + 0.6 * len(by_server) * len(cases)), 3.6)
    width = 0.8 / max(1, len(by_server))
    for number, (server, of_server) in enumerate(by_server.items()):
        places = [place + (number - (len(by_server) - 1) / 2) * width for place in range(len(cases))]
        axes.bar(places, [of_server.get(case, 0.0) for case in cases], width, label=server)
    axes.set_xticks(range(len(cases)), cases)
    axes.legend(fontsize=8, frameon=False)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
