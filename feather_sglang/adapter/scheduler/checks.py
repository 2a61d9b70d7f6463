"""Checks that a feather policy supports the server, made before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.refusals import refuse_policy_flags
from feather_sglang.adapter.scheduler.decision_log import log_file
from feather_sglang.errors import FeatherError


def refuse_unsupported(scheduler: Any, name: str, options: FeatherOptions) -> None:
    """Raise ``FeatherError`` for a server configuration that feather policies, or these options, do not support."""
    refuse_policy_flags(scheduler.server_args, name, options)
    flag = "--feather-tbt" if options.tbt is not None else "--feather-slo" if options.slo is not None else None
    if flag is not None and scheduler.chunked_prefill_size is None:
        raise FeatherError(f"{flag} cuts prompts into chunks, which this server does not do; drop it")
    decision_file(scheduler)


def decision_file(scheduler: Any) -> Path | None:
    """Where this rank's decisions go, if anywhere; raises ``FeatherError`` if they cannot."""
    ranks = getattr(scheduler, "ps", None) or get_parallel()  # since 0.5.21
    return log_file(ranks.tp_rank, ranks.dp_rank)
