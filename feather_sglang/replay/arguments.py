"""The flags of a replay's workload and machine, which ``feather ab`` and ``feather train`` share."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from feather_sglang.adapter.environment import check_output_limit, require_plugin
from feather_sglang.adapter.hooks import (
    PAGES_SINCE,
    SUPPORTED,
    installed_version,
    is_usable,
    lacks_pages,
    lacks_policy,
)
from feather_sglang.adapter.options import VARIABLE, FeatherOptions, ReplayFlag, add_flags
from feather_sglang.errors import FeatherError
from feather_sglang.replay import workloads
from feather_sglang.replay.given import check_positive, flag, given
from feather_sglang.replay.model_shape import DEFAULT_MODEL, MODELS, load_model
from feather_sglang.replay.profiles import list_profiles, load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, load_trace
from feather_sglang.scheduling.policy_names import K_LPM, SINCE, STOCK
from feather_sglang.simulation.clients import STREAM_INTERVAL
from feather_sglang.slo import NAMED, parse

ONLY_ON_SERVERS = (
    "pat_beside",
    "unproven_gpu",
    "allow_switch",
    "record_trace",
)  # options that change nothing in a replay


def add_workload_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Flags that say what is replayed and on what, but for feather's options of these names."""
    parser.add_argument(
        "trace",
        nargs="?",
        help="trace in Mooncake's JSON lines; without one, requests that share prefixes are generated",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N requests (1000 if generated)")
    parser.add_argument(
        "--rate-scale",
        type=_numbers,
        default=(1.0,),
        metavar="X[,X]",
        help="X times the requests a second; each of several is run, and --slo names the largest within the bounds",
    )
    add_slo(parser)
    parser.add_argument("--block-size", type=int, default=512, metavar="TOKENS", help="tokens per hash id of the trace")
    made = parser.add_argument_group("generated workload", "used when no trace is given (paper 5.2)")
    workloads.add_arguments(made)
    server = parser.add_argument_group("server and hardware")
    server.add_argument(
        "--profile",
        default="h200",
        help=f"hardware profile: {', '.join(list_profiles())} or a .json file",
    )
    server.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"model whose steps are timed: {', '.join(sorted(MODELS))} (%(default)s)"
    )
    server.add_argument("--attention", help="decode kernel of the profile (default: its first)")
    server.add_argument("--kv-tokens", type=int, metavar="N", help="KV capacity in tokens (as the GPU has room)")
    server.add_argument("--max-running", type=int, default=500, metavar="N", help="limit of running requests (500)")
    server.add_argument("--chunked-prefill", type=int, default=8192, metavar="TOKENS", help="prefill chunk size (8192)")
    server.add_argument("--page-size", type=int, default=1, metavar="TOKENS", help="KV page size (1)")
    server.add_argument(
        "--stream-interval",
        type=int,
        default=STREAM_INTERVAL,
        metavar="TOKENS",
        help="output tokens in a piece of an answer, after the first (%(default)s)",
    )
    server.add_argument(
        "--prefill-graphs",
        choices=("on", "off"),
        default="on",
        help="CUDA graphs for prefill; without them the host launches each kernel (%(default)s)",
    )
    add_server_flags(server)
    server.add_argument("--seed", type=int, default=0, help="seed of the generated workload and of exploration")
    add_scheduler_cost(server)
    add_flags(parser, ReplayFlag, {*ONLY_ON_SERVERS, *without})


def add_scheduler_cost(parser: argparse._ActionsContainer) -> None:
    """Add ``--scheduler-cost``."""
    parser.add_argument(
        "--scheduler-cost",
        choices=("model", "measured", "off"),
        default="model",
        help="how the host's time counts. model: by the profile; measured: the same, but forming a batch costs the "
        "CPU time that it takes here, which differs from run to run; off: not at all (%(default)s)",
    )


def add_slo(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add ``--slo``."""
    text = f"ttft=SECONDS,tbt=MS or {', '.join(NAMED)}: report the share of requests within these bounds"
    parser.add_argument("--slo", type=parse, metavar="BOUNDS", default=default, help=text)


def add_server_flags(parser: argparse._ActionsContainer) -> None:
    """Add ``--server-flags``."""
    parser.add_argument(
        "--server-flags",
        default="",
        metavar="FLAGS",
        help='flags of SGLang, for all servers: --server-flags="--page-size 16"; a replay refuses some',
    )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or several with commas between") from None


def workload(args: argparse.Namespace) -> Trace:
    """The one trace that the flags ask for."""
    traces = sweep(args)
    if len(traces) > 1:
        raise FeatherError(f"--rate-scale {','.join(f'{scale:g}' for scale in traces)}: give one")
    return next(iter(traces.values()))


def sweep(args: argparse.Namespace) -> dict[float, Trace]:
    """The trace that the flags ask for at each of the rates, by the value of ``--rate-scale``."""
    rates = [f"{scale:g}" for scale in args.rate_scale]  # as results name them
    if len(set(rates)) < len(rates):
        raise FeatherError(f"--rate-scale {','.join(rates)}: a rate is given twice")
    trace = _unscaled(args)
    return {scale: trace.scaled(scale) for scale in args.rate_scale}


def _unscaled(args: argparse.Namespace) -> Trace:
    check_positive(args, "requests")
    if args.trace is None:
        return workloads.made(args, args.requests or 1000)
    if ignored := given(args, workloads.add_arguments):
        instead = "; with a trace use --rate-scale" if ignored == ["rate"] else ", not with a trace"
        raise FeatherError(f"{' and '.join(map(flag, ignored))}: for a generated workload{instead}")
    return load_trace(args.trace, args.block_size, args.requests)


def step_model(args: argparse.Namespace) -> tuple[StepTimeModel, dict[str, Any]]:
    """The step-time model and the replayed server's settings."""
    profile, shape = load_profile(args.profile), load_model(args.model)
    packed = feather_options(args).pat_prefill
    model = StepTimeModel(profile, shape, args.attention, args.prefill_graphs == "on", packed)
    if args.scheduler_cost != "off":
        profile.known_host()
    check_sizes(args)
    check_pages(args.page_size)
    settings = {
        "kv_tokens": args.kv_tokens or profile.kv_tokens(shape),
        "max_running": args.max_running,
        "chunked_prefill": args.chunked_prefill,
        "page_size": args.page_size,
        "stream_interval": args.stream_interval,
        "scheduler_cost": args.scheduler_cost,
    }
    return model, settings


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ``FeatherError`` for a size of the server that cannot be."""
    check_positive(args, "kv_tokens", "max_running", "page_size", "stream_interval")


def check_pages(page_size: int) -> None:
    """Raise ``FeatherError`` where the installed SGLang cannot replay with pages of this many tokens."""
    version = installed_version()
    if page_size > 1 and lacks_pages(version):
        raise FeatherError(
            f"--page-size {page_size}: sglang {version} needs a GPU for pages, and a replay has none; leave it out, or "
            f"install sglang {PAGES_SINCE} or later"
        )


def check_sglang(policies: Sequence[str] = ()) -> str:
    """Version of the installed SGLang; one clear line if there is none that fits and has these policies.

    Without any, or where one is not SGLang's, it must load the plugin.
    """
    if importlib.util.find_spec("sglang") is None:
        raise FeatherError("SGLang is not installed here: `python3 dev.py ab` in a checkout sets everything up")
    version = installed_version()
    if not is_usable(version):
        raise FeatherError(f"sglang {version} is not supported; install one of {SUPPORTED[0]} to {SUPPORTED[-1]}")
    for name in policies:
        if lacks_policy(version, name):
            raise FeatherError(
                f"--policies: sglang {version} has no {name}; leave it out, or install sglang {SINCE[name]} or later"
            )
    if not policies or not {*STOCK, K_LPM}.issuperset(policies):
        require_plugin()
    assert version is not None  # there is an SGLang
    return version


def check_fits(trace: Trace, kv_tokens: int | None, page_size: int) -> None:
    """Raise ``FeatherError`` if a request could never run, or not to its end; `kv_tokens` None: not known yet."""
    check_output_limit(trace.name, max((request.output_length for request in trace.requests), default=0))
    least = trace.least_pool(page_size)
    if kv_tokens and least > kv_tokens:
        pages = f" in pages of {page_size}" if page_size > 1 else ""
        raise FeatherError(
            f"a request of {trace.name} needs {least} tokens of KV{pages}, --kv-tokens is {kv_tokens}; raise it"
        )


def feather_options(args: argparse.Namespace) -> FeatherOptions:
    """What FEATHER_OPTIONS says, the flags, which win over it, and ``--seed``."""
    flags = {name.removeprefix("feather_"): value for name, value in vars(args).items() if name.startswith("feather_")}
    options = replace(FeatherOptions.from_environment(), **flags)
    if options.seed not in (FeatherOptions.seed, args.seed):
        raise FeatherError(f"{VARIABLE}: seed={options.seed}: leave it out here, and give --seed")
    return replace(options, seed=args.seed)


def common_options(args: argparse.Namespace) -> dict[str, Any]:
    """What FEATHER_OPTIONS holds for nearly all policies (``suited``); each policy file is for one of them."""
    return {**feather_options(args).of_policy(), "policy_file": None}


def suited(policy: str, options: dict[str, Any]) -> dict[str, Any]:
    """These options as that policy takes them: under feather-order SGLang admits, and nothing is paced or bounded."""
    return {**options, "pace": 0.0, "tbt": None, "slo": None} if policy == "feather-order" else dict(options)
