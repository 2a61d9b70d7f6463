"""Start-up: from SGLang's command line to a scheduler under a feather policy.

It calls through hooks (``plugin``), or through the extension points of a patched SGLang (``scheduler.registered``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.attention.registration import PAT, offer_backend
from feather_sglang.adapter.failures import begin_command_line, expect_refusals, refusals_end_start_up
from feather_sglang.adapter.hooks import installed_version, require_fit, untested
from feather_sglang.adapter.options import FeatherOptions, add_flags, packs_prefill, records_trace, switch_allowed
from feather_sglang.adapter.refusals import refuse_pat_flags, refuse_policy_flags
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import FEATHER

logger = logging.getLogger(__name__)


def offer(parser: Any) -> None:
    """Offer the backend and the ``--feather-*`` flags on SGLang's command line."""
    offer_backend(parser)
    add_flags(parser)
    begin_command_line()


def refuse_arguments(args: Any) -> None:
    """Refuse what flags alone tell, once all are known and before a model is loaded.

    This runs in the server's own process, so ``--feather-allow-switch`` begins here too.
    """
    with refusals_end_start_up():
        if switch_allowed():
            require_fit("--feather-allow-switch", "switch")
            from feather_sglang.adapter.switch.endpoint import add_endpoint, refuse_unguarded

            refuse_unguarded(args)
            add_endpoint()
        if args.schedule_policy in FEATHER:
            refuse_policy_flags(args, args.schedule_policy, FeatherOptions.from_environment())
        if PAT in _backends(args):
            require_fit("--decode-attention-backend pat", PAT)
            refuse_pat_flags(args)
        elif packs_prefill():
            raise FeatherError("--feather-pat-prefill is for the pat backend: give --decode-attention-backend pat, too")
        if records_trace():
            require_fit("--feather-record-trace")
        if args.schedule_policy in FEATHER or switch_allowed() or records_trace() or PAT in _backends(args):
            expect_refusals()


def _backends(args: Any) -> tuple[Any, Any]:
    return args.attention_backend, args.decode_attention_backend


def start_policy(scheduler: Any) -> None:
    """Put the scheduler's feather policy in charge, or end its start-up with one clear line."""
    with refusals_end_start_up():
        name = scheduler.schedule_policy
        require_fit(f"--schedule-policy {name}")
        from feather_sglang.adapter.scheduler.checks import refuse_unsupported
        from feather_sglang.adapter.scheduler.construction import make_stop_policy
        from feather_sglang.adapter.scheduler.feather_scheduler import take_over

        if warning := untested(installed_version()):
            logger.warning("feather: %s", warning)
        options = FeatherOptions.from_environment()
        refuse_unsupported(scheduler, name, options)
        take_over(scheduler, name, options, make_stop_policy(name, options))
    logger.info("feather: %s is active (sglang %s)", name, installed_version())


def start_record(scheduler: Any) -> None:
    """Record the scheduler's requests, or end its start-up with one clear line."""
    with refusals_end_start_up():
        from feather_sglang.adapter.recording.recorder import start_recording

        start_recording(scheduler)


def start_switch(scheduler: Any, initialise: Callable[[], Any]) -> None:
    """Let the scheduler take orders to switch its policy; ``initialise`` is SGLang's ``init_schedule_policy`` of it."""
    with refusals_end_start_up():
        require_fit("--feather-allow-switch", "switch")
        from feather_sglang.adapter.switch.switch import Switch

        Switch(scheduler, initialise).install()
