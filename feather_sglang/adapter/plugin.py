"""Entry point of SGLang's plugin framework (group ``sglang.srt.plugins``).

SGLang calls ``register`` in every process before it parses arguments, and only logs a plugin that fails. So nothing
here may fail for a user of a stock policy, and everything that a feather policy needs is checked again when one is
asked for, where a failure ends start-up.

An SGLang with extension points (``patches/``) is told of the policies and calls them; any other is hooked.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from feather_sglang.adapter.attention.registration import construct, register_backend, resolve
from feather_sglang.adapter.failures import refusals_end_start_up
from feather_sglang.adapter.hooks import HOOKS, INIT, exists, extension_points, is_needed
from feather_sglang.adapter.options import records_trace, switch_allowed
from feather_sglang.adapter.start_up import offer, refuse_arguments, start_policy, start_record, start_switch
from feather_sglang.adapter.step_log import start_step_log
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import FEATHER


def extend_parser(_result: Any, parser: Any) -> None:
    """Offer the policy names, the backend and the ``--feather-*`` flags (after ``ServerArgs.add_cli_args``)."""
    for action in parser._actions:
        if action.dest == "schedule_policy" and action.choices is not None:
            action.choices = [*action.choices, *FEATHER]
    offer(parser)


def check_server_args(original: Any, args: Any) -> Any:
    """Refuse what flags alone tell, and let a feather policy pass where SGLang's own check would not.

    SGLang allows priority scheduling to fcfs and lof only.
    """
    refuse_arguments(args)
    name = args.schedule_policy
    if name not in FEATHER or not args.enable_priority_scheduling:
        return original(args)
    # Arguments are sealed by their class by now; the base class's setter is not.
    write = super(type(args), args).__setattr__
    write("schedule_policy", "fcfs")
    try:
        return original(args)
    finally:
        write("schedule_policy", name)


def accept_policy(original: Any, policy: Any, name: str, tree_cache: Any) -> Any:
    """Give SGLang its fcfs for a feather name; ``start`` takes the scheduler over right after."""
    if name in FEATHER and INIT not in HookRegistry._patched:
        raise FeatherError(f"{INIT} could not be hooked, so --schedule-policy {name} would run as fcfs; see the log")
    return original(policy, "fcfs" if name in FEATHER else name, tree_cache)


def start(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Set up a scheduler for a feather policy and for switching, or end its start-up with one clear line."""
    result = original(scheduler, *args, **kwargs)
    if records_trace():
        start_record(scheduler)  # first, as whoever wraps a method later lets it go earlier
    extended = extension_points() is not None  # then the policy has started itself, and hears of pauses
    if scheduler.schedule_policy in FEATHER and not extended:
        start_policy(scheduler)
    if switch_allowed():
        start_switch(scheduler, functools.partial(original, scheduler, *args, **kwargs))
    elif scheduler.schedule_policy in FEATHER and not extended:
        from feather_sglang.adapter.scheduler.state import tell_state

        tell_state(scheduler)
    if (scheduler.schedule_policy in FEATHER or switch_allowed()) and not extended:
        _watch_pauses(scheduler)
    with refusals_end_start_up():
        start_step_log(scheduler)
    return result


def _watch_pauses(scheduler: Any) -> None:
    """Tell the policy in force when a pause is over; SGLang binds this handler once, after its policy is set up."""

    def continue_generation(original: Any, *args: Any, **kwargs: Any) -> Any:
        feather = getattr(scheduler, "feather", None)
        if feather is not None:
            feather.meters.resumed()
        return original(*args, **kwargs)

    Wrappings().wrap(scheduler, "continue_generation", continue_generation)


HANDLERS = {
    "add_cli_args": (extend_parser, HookType.AFTER),
    "check_server_args": (check_server_args, HookType.AROUND),
    "_validate_and_adjust_policy": (accept_policy, HookType.AROUND),
    "init_schedule_policy": (start, HookType.AROUND),
    "__post_init__": (construct, HookType.AROUND),
    "resolve_once": (resolve, HookType.AROUND),
}


def register() -> None:
    """Register the policies or the start-up hooks, and the backend's name; the rest follows where it is asked for."""
    register_backend()
    if extension_points() is not None:
        from feather_sglang.adapter.scheduler.registered import register_policies

        register_policies()
    parts = ["policy", "pat", *(["switch"] if switch_allowed() else [])]
    for hook in HOOKS:
        needed = any(is_needed(hook, part) for part in parts) or (hook.target == INIT and records_trace())
        if hook.kind == "start" and needed and (exists(hook) or not hook.optional):
            handler, kind = HANDLERS[hook.target.rpartition(".")[2]]
            HookRegistry.register(hook.target, handler, kind)
