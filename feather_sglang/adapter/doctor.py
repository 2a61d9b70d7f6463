"""``feather doctor``: what this installation has, and whether a server started here would run feather."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from feather_sglang import __version__
from feather_sglang.adapter.attention.beside import PAT
from feather_sglang.adapter.environment import why_inactive
from feather_sglang.adapter.hooks import (
    FEATURES,
    HOOKS,
    SUPPORTED,
    extension_points,
    installed_version,
    is_needed,
    is_usable,
    misfit,
    mismatch,
    untested,
)
from feather_sglang.adapter.options import VARIABLE, FeatherOptions, check_file
from feather_sglang.errors import FeatherError, quoted

ACTIVE = (
    "a server started here loads the plugin; --schedule-policy feather activates it. SGLang's own benchmarks with a "
    "server's flags (sglang.benchmark.one_batch, one_batch_server, offline_throughput) load no plugin: measure a server"
)

WHEN = {  # by a hook's kind
    "start": "wrapped at start-up",
    "server": "wrapped where a server starts that asks for it",
    "scheduler": "wrapped under feather only",
    "switch": "wrapped under --feather-allow-switch only",
    "pat": "wrapped under pat only",
    "calls": "called, not wrapped",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``feather doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--model", metavar="PATH", help="a model's folder or config.json: which layers pat packs")
    parser.add_argument("--gpu", metavar="NAME", help="the server's GPU, where it is another: h100, rtx4090, 9.0")
    parser.add_argument("--verbose", action="store_true", help="print all that was found, and every hook into SGLang")
    parser.add_argument("--matrix", action="store_true", help="print what pat serves, by model, mode, GPU and release")


def _torch() -> tuple[str, str]:
    """Versions of torch and the GPU, as text."""
    if importlib.util.find_spec("torch") is None:
        return "not installed", "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return torch.__version__, "none"
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return torch.__version__, ", ".join(f"{gpu.name} (sm_{gpu.major}{gpu.minor})" for gpu in found)


def _hooks() -> list[dict[str, Any]]:
    """Every hook with its ``problem`` (None if it fits) and the ``features`` that are lost without it."""
    from feather_sglang.adapter import cpu_shims

    cpu_shims.install()
    found = []
    for hook in HOOKS:
        needed = [part for part in FEATURES if is_needed(hook, part)]
        found.append({
            **hook._asdict(),
            "kind": "switch" if needed == ["switch"] else hook.kind,
            "features": hook.features,
            "needed": bool(needed),
            "problem": mismatch(hook) if needed else None,
        })  # fmt: skip
    return found


def _kernels() -> str:
    """Whether the kernels are installed, and whether compiled ones are."""
    if importlib.util.find_spec("feather_kernels") is None:
        return "not installed (needed by no policy)"
    from feather_kernels.prebuilt import describe

    return f"installed; {describe() or 'compiled at first use (feather-kernels, which has them compiled, is not here)'}"


def _pat() -> str:
    """Whether a server started here could decode with the pat backend; on a GPU, by doing it once."""
    if importlib.util.find_spec("feather_kernels") is None or importlib.util.find_spec("torch") is None:
        return "not available: needs feather_kernels and torch"
    import torch

    from feather_kernels.errors import BuildError

    if not torch.cuda.is_available():
        return f"cannot serve here: no GPU ({_kernels_of_a_gpu()})"
    from feather_kernels.self_test import self_test

    try:
        return self_test()
    except BuildError as error:
        return f"cannot serve here: {error}"


def _kernels_of_a_gpu() -> str:
    """Where a server here would have its kernels from: the wheel, or a compiler."""
    from feather_kernels import prebuilt
    from feather_kernels.build import cutlass_include, find_nvcc
    from feather_kernels.errors import BuildError

    if prebuilt.has_kernels():
        return str(prebuilt.describe())
    try:
        return f"{find_nvcc()}, headers in {cutlass_include()}"
    except BuildError as error:
        return str(error)


def examine() -> dict[str, Any]:
    """Everything ``feather doctor`` reports, as plain data; ``healthy`` sums it up."""
    version = installed_version()
    torch_version, gpu = _torch()
    hooks = _hooks() if version is not None else []
    points = extension_points() if version is not None else None
    way = "by hooks; `feather patch apply` would give this SGLang extension points"
    if points is not None:
        way = f"by extension points in SGLang's source (version {points}); policies wrap nothing"
    inactive = why_inactive()
    try:
        given = FeatherOptions.from_environment()
        for name, value in asdict(given).items():
            if value is not None:
                check_file(name, value)
        options, options_problem = str(given), None
    except FeatherError as error:
        options, options_problem = "", str(error)
    fits = {
        "sglang": is_usable(version),
        "activation": inactive is None,
        "options": options_problem is None,
        "hooks": all(hook["problem"] is None for hook in hooks if FEATURES["policy"] in hook["features"]),
    }
    note = untested(version) if all(hook["problem"] is None for hook in hooks) else None
    sglang = f"{version}: {note}" if note else version
    kernels = _kernels()
    return {
        "feather": __version__,
        "python": platform.python_version(),
        "sglang": sglang or f"not installed (supported: {SUPPORTED[0]} to {SUPPORTED[-1]})",
        "sglang_supported": version in SUPPORTED,
        "torch": torch_version,
        "gpu": gpu,
        "kernels": kernels,
        "pat": _pat(),
        "activation": inactive or ACTIVE,
        "options": options_problem or f"{VARIABLE}: {options}",
        "extension_points": points,
        "policies": way,
        "hooks": hooks,
        "features": {feature: misfit(part) for part, feature in FEATURES.items()},
        "problems": [name for name, fit in fits.items() if not fit],
        "healthy": all(fits.values()),
    }


def _capability(gpu: str) -> tuple[int, int]:
    """Compute capability of a GPU by its name, or as it is written itself."""
    from feather_sglang.adapter.attention.matrix import GPUS

    known = {name.lower().replace(" ", ""): number for number, names in GPUS.items() for name in names.split(", ")}
    wanted = gpu.lower().replace(" ", "").replace("-", "").replace("_", "")
    number = known.get(wanted) or {f"{each / 10:.1f}": each for each in GPUS}.get(gpu)
    if number is None:
        raise FeatherError(f"--gpu {quoted(gpu)}: not known; give one of {', '.join(known)}, or a capability as in 9.0")
    return divmod(number, 10)


def verdict(report: dict[str, Any], model: Any = None, gpu: str | None = None) -> dict[str, str]:
    """What a server gets that is started here, or on that GPU, with a model of those facts: five lines by name."""
    stopped = next((str(report[name]) for name in ("activation", "options") if name in report["problems"]), None)
    refused = {part: "see above" if stopped else report["features"][feature] for part, feature in FEATURES.items()}
    packs, rest = "which layers it packs, says --model PATH", "-"
    try:
        if gpu is not None:
            _refuse_gpu(gpu, model)
        elif report["pat"].startswith(("cannot", "not")):
            raise FeatherError(f"{report['pat'].removeprefix('cannot serve here: ')}; --gpu NAME tells of another's")
        if model is not None:
            from feather_sglang.adapter.attention.limits import packing

            packs, rest = packing(model)
    except FeatherError as error:
        refused[PAT] = refused[PAT] or str(error)
    flags = {"policy": "--schedule-policy feather", PAT: "--decode-attention-backend pat"}
    served = [part for part in flags if not refused[part]]
    where = gpu or f"GPU: {report['gpu']}"
    return {
        "sglang": f"{report['sglang']}, {where}; {stopped or 'a server loads the plugin'}",
        "policy": f"not served: {refused['policy']}" if refused["policy"] else "served",
        PAT: f"not served: {refused[PAT]}" if refused[PAT] else f"served: {packs}",
        "rest": rest if PAT in served else "SGLang's own backends decode all layers",
        "flags": " ".join(flags[part] for part in served) or "none",
    }


def _refuse_gpu(gpu: str, model: Any) -> None:
    from feather_sglang.adapter.attention.limits import refuse_capability

    refuse_capability(*(found := _capability(gpu)))
    if model is not None and any(layer.latent for layer in model.layers) and found != (9, 0):
        raise FeatherError("latent attention is packed on GPUs of compute capability 9.0 only")


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit status is 0 if a server here could run feather, 1 if not."""
    if args.matrix:
        return _print_matrix(args.json)
    model = None
    if args.gpu is not None:
        _capability(args.gpu)
    if args.model is not None:
        from feather_sglang.adapter.attention.model_file import read_model

        model = read_model(args.model)
    with warnings.catch_warnings():  # SGLang's, of what this machine lacks
        warnings.simplefilter("ignore")
        report = examine()
    report["verdict"] = verdict(report, model, args.gpu)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0 if report["healthy"] else 1
    lines = [f"{name:8}{text}" for name, text in report["verdict"].items()]
    if args.verbose:
        lines += _all(report)
    if not report["healthy"]:
        notes = {"sglang": f"sglang (feather supports {SUPPORTED[0]} to {SUPPORTED[-1]})"}
        problems = ", ".join(notes.get(name, name) for name in report["problems"])
        lines.append(f"not ready, because of {problems}: see above")
    print("\n".join(lines))
    return 0 if report["healthy"] else 1


def _all(report: dict[str, Any]) -> Iterator[str]:
    """What was found, by its name; then every hook and what it is for, those that differ first."""
    names = ("feather", "python", "sglang", "torch", "gpu", "kernels", "pat", "activation", "policies", "options")
    for name in names:
        yield f"{name:12}{report[name]}"
    for feature, reason in report["features"].items():
        yield f"{feature:12}{reason or 'all hooks fit'}"
    for hook in sorted(report["hooks"], key=lambda hook: hook["problem"] is None):
        status = "unused" if not hook["needed"] else "fits" if hook["problem"] is None else "differs"
        yield f"{status:8}{hook['target'].removeprefix('sglang.srt.')}({', '.join(hook['parameters'])})"
        yield f"        {WHEN[hook['kind']]}: {hook['purpose']}"
        if hook["problem"] is not None:
            yield f"        without it no {' and no '.join(hook['features'])}: {hook['problem']}"


def _print_matrix(as_json: bool) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from feather_sglang.adapter.attention.matrix import tables

    if as_json:
        print(
            json.dumps({title: [dict(zip(heads, row, strict=True)) for row in rows] for title, heads, rows in tables()})
        )
        return 0
    console = Console()
    if not console.is_terminal:  # a row is a line there, to be searched
        console.width = 1000
    for title, heads, rows in tables():
        shown = Table(title=title, title_justify="left", box=None)
        for head in heads:
            shown.add_column(head, overflow="fold")  # names of tests are there to be copied
        for row in rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
    return 0
