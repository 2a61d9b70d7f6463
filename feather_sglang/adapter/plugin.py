"""Entry point of SGLang's plugin framework (group ``sglang.srt.plugins``).

SGLang calls ``register`` in every process before it parses arguments, and only logs a plugin that fails. So nothing
here may fail for a user of a stock policy, and everything that a feather policy needs is checked again when one is
asked for, where a failure ends start-up.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from feather_sglang.adapter.attention.registration import PAT, decode_only, offer_backend, register_backend
from feather_sglang.adapter.failures import begin_command_line, end_start_up
from feather_sglang.adapter.hooks import HOOKS, exists, installed_version, mismatches, untested
from feather_sglang.adapter.options import FeatherOptions, add_flags, switch_allowed
from feather_sglang.adapter.refusals import refuse_pat_flags, refuse_policy_flags
from feather_sglang.adapter.wrapping import Wrappings
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import FEATHER

logger = logging.getLogger(__name__)

INIT = "sglang.srt.managers.scheduler.Scheduler.init_schedule_policy"


def extend_parser(_result: Any, parser: Any) -> None:
    """Offer the policy names, the backend and the ``--feather-*`` flags (after ``ServerArgs.add_cli_args``)."""
    for action in parser._actions:
        if action.dest == "schedule_policy" and action.choices is not None:
            action.choices = [*action.choices, *FEATHER]
    offer_backend(parser)
    add_flags(parser)
    begin_command_line()


def check_server_args(original: Any, args: Any) -> Any:
    """Refuse what flags alone tell, and let a feather policy pass where SGLang's own check would not.

    SGLang allows priority scheduling to fcfs and lof only. This runs in the server's own process, once all flags are
    known and before a model is loaded, so ``--feather-allow-switch`` begins here too.
    """
    try:
        if switch_allowed():
            from feather_sglang.adapter.switch.endpoint import add_endpoint, refuse_unguarded

            refuse_unguarded(args)
            add_endpoint()
        if args.schedule_policy in FEATHER:
            refuse_policy_flags(args, args.schedule_policy, FeatherOptions.from_environment())
        if PAT in (args.attention_backend, args.decode_attention_backend):
            refuse_pat_flags(args)
    except FeatherError as error:
        end_start_up(error)
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
    try:
        if scheduler.schedule_policy in FEATHER:
            _start_policy(scheduler, scheduler.schedule_policy)
        if switch_allowed():
            _start_switch(scheduler, functools.partial(original, scheduler, *args, **kwargs))
        if scheduler.schedule_policy in FEATHER or switch_allowed():
            _watch_pauses(scheduler)
    except FeatherError as error:
        end_start_up(error)
    return result


def _start_policy(scheduler: Any, name: str) -> None:
    if found := mismatches():
        raise FeatherError(f"this SGLang does not fit --schedule-policy {name}: {'; '.join(found)}")
    from feather_sglang.adapter.scheduler.checks import refuse_unsupported
    from feather_sglang.adapter.scheduler.construction import make_stop_policy
    from feather_sglang.adapter.scheduler.feather_scheduler import take_over

    if warning := untested(installed_version()):
        logger.warning("feather: %s", warning)
    options = FeatherOptions.from_environment()
    refuse_unsupported(scheduler, name, options)
    take_over(scheduler, name, options, make_stop_policy(name, options))
    logger.info("feather: %s is active (sglang %s)", name, installed_version())


def _watch_pauses(scheduler: Any) -> None:
    """Tell the policy in force when a pause is over; SGLang binds this handler once, after its policy is set up."""

    def continue_generation(original: Any, *args: Any, **kwargs: Any) -> Any:
        feather = getattr(scheduler, "feather", None)
        if feather is not None:
            feather.resumed()
        return original(*args, **kwargs)

    Wrappings().wrap(scheduler, "continue_generation", continue_generation)


def _start_switch(scheduler: Any, initialise: Any) -> None:
    if found := mismatches("switch"):
        raise FeatherError(f"this SGLang does not fit --feather-allow-switch: {'; '.join(found)}")
    from feather_sglang.adapter.switch.switch import Switch

    Switch(scheduler, initialise).install()


HANDLERS = {
    "add_cli_args": (extend_parser, HookType.AFTER),
    "check_server_args": (check_server_args, HookType.AROUND),
    "_validate_and_adjust_policy": (accept_policy, HookType.AROUND),
    "init_schedule_policy": (start, HookType.AROUND),
    "__post_init__": (decode_only, HookType.BEFORE),
    "resolve_once": (decode_only, HookType.BEFORE),
}


def register() -> None:
    """Register the start-up hooks and the backend's name; what runs per step follows only where it is asked for."""
    register_backend()
    for hook in HOOKS:
        if hook.kind == "start" and (exists(hook) or not hook.optional):
            handler, kind = HANDLERS[hook.target.rpartition(".")[2]]
            HookRegistry.register(hook.target, handler, kind)
