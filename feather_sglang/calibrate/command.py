"""``feather calibrate``: log the steps of servers, fit a profile, and report its errors, on held-out loads too."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from feather_sglang import __version__
from feather_sglang.calibrate.recording import FORMAT, Recording, Setting, record
from feather_sglang.compare.server.cases import vocabulary_of
from feather_sglang.compare.server.config import BACKENDS
from feather_sglang.compare.server.machine import machine
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import check_target, make_folder, replace_text
from feather_sglang.replay import server_flags
from feather_sglang.replay.arguments import check_sglang
from feather_sglang.replay.model_shape import ModelShape, shape_of
from feather_sglang.replay.profiles import HardwareProfile, document_of, list_profiles, load_profile
from feather_sglang.report.tables import grid

COMMON = (
    *("--skip-tokenizer-init", "--load-format", "dummy", "--sampling-backend", "pytorch"),
    *("--max-running-requests", "512", "--cuda-graph-max-bs-decode", "512"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather calibrate``."""
    parser.add_argument("--model", required=True, metavar="FOLDER", help="folder of the model or its config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="PROFILE.json", help="file of the new profile")
    parser.add_argument(
        "--profile",
        default="h200",
        help=f"profile that is scaled to this GPU: {', '.join(list_profiles())} or a .json file (%(default)s)",
    )
    parser.add_argument("--name", help="name of the new profile (default: the file's name)")
    parser.add_argument(
        "--attention",
        default="pat,fa3",
        metavar="LIST",
        help="decode kernels to measure, each on a server of its own (%(default)s); prefill runs without CUDA "
        "graphs on the first server, and in CUDA graphs on the others",
    )
    parser.add_argument("--server-flags", default="", metavar="FLAGS", help="further flags of all servers, quoted")
    parser.add_argument(
        "--time-limit", type=float, default=480.0, metavar="SECONDS", help="limit of the measurement (%(default)g)"
    )
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="file of the recording (default: beside the profile, .recording.json.gz)",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, nargs="+", metavar="FILE", help="fit these recordings and measure nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, fit, print how well it fits, write the profile."""
    console = Console(highlight=False)
    base = load_profile(args.profile)
    check(args)
    settings = settings_of(args.attention, base)
    recording = Recording.load(args.source) if args.source else measured(args, settings, console)
    try:
        shape = shape_of(recording.content["model"], args.model)
        text, document = fitted(recording, base, shape, args.name or args.out.stem)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if not args.source:
            raise
        files = " ".join(map(str, args.source))
        raise FeatherError(f"--from {files}: not a whole recording: {type(error).__name__} {error}") from error
    replace_text(args.out, json.dumps(document, indent=1) + "\n", "the profile")
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"wrote {args.out}: feather ab --profile {args.out}", soft_wrap=True)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise ``FeatherError`` for what the flags alone tell cannot be, before anything is measured."""
    if args.out.suffix != ".json":
        raise FeatherError(f"--out {args.out}: the name of a profile must end in .json")
    check_target(args.out, "the profile")
    if any(args.out.resolve() == path.resolve() for path in args.source or ()):
        raise FeatherError(f"--out {args.out}: is one of the recordings of --from; name another file")
    if not 0 < args.time_limit < math.inf:
        raise FeatherError(f"--time-limit {args.time_limit:g}: must be more than 0 seconds")
    make_folder(args.out.absolute().parent)


def fitted(recording: Recording, base: HardwareProfile, shape: ModelShape, name: str) -> tuple[str, dict[str, Any]]:
    """The report of a fit, and the profile's JSON."""
    from feather_sglang.calibrate.fit_gpu import batches, fit_gpu, fit_memory  # SciPy, where something is fitted
    from feather_sglang.calibrate.fit_host import fit_host

    host, stages = fit_host(recording, shape.layers, base.host)
    found = batches([one for one in recording.steps() if not one.held_out])
    profile, steps = fit_gpu(fit_memory(base, shape, recording), shape, found)
    prices = ", ".join(f"{key} {value * 1e6:.4g}" for key, value in asdict(host).items())
    title = recording.content["title"]
    said = f"fit (feather calibrate) to steps of {title}"
    document = document_of(base, replace(profile, host=host), name, title, said)
    return f"{report(stages, steps)}\nhost: {prices} (us)", document


def measured(args: argparse.Namespace, settings: Sequence[Setting], console: Console) -> Recording:
    """Start the servers, send the loads, and keep what came of it."""
    begun = time.monotonic()
    vocabulary = vocabulary_of(args.model)
    version = check_sglang()
    config = json.loads((Path(args.model) / "config.json").read_text())
    shape_of(config, args.model)  # refuses what the model of step times does not know
    target = args.recording or args.out.with_suffix(".recording.json.gz")
    check_target(target, "the recording")
    common = [*COMMON, *server_flags.split(args.server_flags)]
    facts = machine()
    if facts["gpu"] is None:
        raise FeatherError("feather calibrate measures a GPU, and nvidia-smi shows none; --from FILE fits a recording")
    logs = make_folder(args.out.absolute().parent / f"{args.out.stem}-logs")

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - begun:5.0f} s] {text}", markup=False, soft_wrap=True)

    servers = record(args.model, settings, vocabulary, common, logs, begun + args.time_limit, say)
    content = {
        "format": FORMAT,
        "command": shlex.join(["feather", *sys.argv[1:]]),
        "feather": __version__,
        "sglang": version,
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "title": f"{Path(args.model).name} on {facts['gpu']}, SGLang {version}, {time.strftime('%d %b %Y')}",
        "machine": facts,
        "model": config,
        "servers": servers,
    }
    recording = Recording(content)
    recording.save(target)
    say(f"all is measured, and the recording is in {target}")
    return recording


def settings_of(names: str, base: HardwareProfile) -> list[Setting]:
    """The servers for these decode kernels, which the base profile must have."""
    chosen = [name.strip() for name in names.split(",")]
    known = [name for name in BACKENDS if name in base.attention]
    if not set(chosen) <= set(known) or len(set(chosen)) < len(chosen):
        raise FeatherError(f"--attention {names}: name kernels of profile {base.name}, each once: {', '.join(known)}")
    return [Setting(name, prefill_graphs=place > 0) for place, name in enumerate(chosen)]


def report(stages: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    """How far the fit is from the host's stages and from the GPU's batches."""

    def row(name: str, one: dict[str, Any], digits: int) -> list[str]:
        measured, fitted = (f"{one[key] * 1e3:.{digits}f} ms" for key in ("seconds", "predicted"))
        return [name, str(one.get("steps", "")), measured, fitted, f"{one['predicted'] / one['seconds']:.2f}"]

    return grid([
        ["stage of the host", "steps", "measured", "fitted", "ratio"],
        *(row(f"{one['stage']} ({one['kind']})", one, 3) for one in stages),
        ["step of the GPU", "", "measured", "fitted", "ratio"],
        *(row(one["batch"], one, 2) for one in steps),
    ])  # fmt: skip
