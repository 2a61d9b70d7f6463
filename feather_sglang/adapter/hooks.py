"""Every place where feather touches SGLang, in one table, and the check that the installed SGLang still fits it.

Three kinds:

``start``
    Wrapped through SGLang's hook registry when the plugin loads. They run while a server starts, never per step.
``scheduler``
    Wrapped on the one scheduler object, and only when it was started with a feather policy: under any other
    policy the methods that SGLang calls per step are its own, untouched.
``calls``
    Not wrapped: called or read by feather, so their shape matters just as much.
"""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from typing import Any, NamedTuple

SUPPORTED = tuple(f"0.5.{patch}" for patch in range(17, 24))


class Hook(NamedTuple):
    """One touching point: dotted target, kind, the leading parameters expected, what it is for."""

    target: str
    kind: str
    parameters: tuple[str, ...]
    purpose: str
    names: tuple[str, ...] = ()  # names the body must mention, where feather relies on how it works


_ARGS = "sglang.srt.server_args.ServerArgs."
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch."

HOOKS = (
    Hook(_ARGS + "add_cli_args", "start", ("parser",), "policy names and --feather-* flags"),
    Hook(_ARGS + "check_server_args", "start", ("self",), "priority scheduling together with a feather policy"),
    Hook(_POLICY + "_validate_and_adjust_policy", "start", ("self", "policy", "tree_cache"), "accept the policy names"),
    Hook(_SCHEDULER + "init_schedule_policy", "start", ("self",), "take over a scheduler started with them"),
    Hook(
        _POLICY + "calc_priority", "scheduler", ("self", "waiting_queue", "running_batch"), "an admission round opens"
    ),
    Hook(_SCHEDULER + "_add_request_to_queue", "scheduler", ("self", "req"), "a request arrives or comes back"),
    Hook(
        _SCHEDULER + "_get_new_batch_prefill_raw",
        "scheduler",
        ("self", "prefill_delayer_single_pass", "running_batch"),
        "an admission round, request by request",
        ("waiting_queue", "can_run_list", "calc_priority", "add_one_req", "get_num_allocatable_reqs"),
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        "scheduler",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        "a proposed request was admitted or not",
        ("can_run_list",),
    ),
    Hook(_SCHEDULER + "update_running_batch", "scheduler", ("self", "batch"), "prefix row order before a decode step"),
    Hook(
        _SCHEDULER + "process_batch_result", "scheduler", ("self", "batch", "result"), "decode throughput, the reward"
    ),
    Hook(_SCHEDULER + "get_next_batch_to_run", "scheduler", ("self", "running_batch", "last_batch"), "the debug check"),
    Hook(_SCHEDULER + "get_num_allocatable_reqs", "calls", ("self", "running_bs"), "free slots of the batch"),
    Hook(_BATCH + "filter_batch", "calls", ("self",), "permutes all state that SGLang keeps per row", ("reqs",)),
)


def installed_version() -> str | None:
    """The installed SGLang's version, or None without one."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def _resolve(target: str) -> Any:
    module, _, rest = target.rpartition(".")
    try:
        return inspect.getattr_static(importlib.import_module(module), rest)
    except ModuleNotFoundError:
        module, _, owner = module.rpartition(".")
        return inspect.getattr_static(getattr(importlib.import_module(module), owner), rest)


def mismatch(hook: Hook) -> str | None:
    """What differs between the installed SGLang and what ``hook`` expects, or None if it fits."""
    try:
        found = _resolve(hook.target)
    except (ImportError, AttributeError) as error:
        return f"{hook.target}: not found ({error})"
    except Exception as error:  # an SGLang that does not import raises whatever it likes
        return f"{hook.target}: cannot be imported ({type(error).__name__}: {error})"
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"{hook.target}: not a function"
    if parameters[: len(hook.parameters)] != hook.parameters:
        return f"{hook.target}: takes ({', '.join(parameters)}), expected ({', '.join(hook.parameters)}, ...)"
    code = getattr(inspect.unwrap(function), "__code__", None)
    missing = [name for name in hook.names if code is None or name not in code.co_names]
    if missing:
        return f"{hook.target}: does not use {', '.join(missing)} any more"
    return None


def mismatches() -> list[str]:
    """Everything that keeps the installed SGLang from working with feather; empty if it fits."""
    version = installed_version()
    found = [] if version in SUPPORTED else [f"sglang {version} is not one of {SUPPORTED[0]} to {SUPPORTED[-1]}"]
    return found + [text for hook in HOOKS if (text := mismatch(hook)) is not None]
