"""What a feather policy does not support, found before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler.decision_log import log_file
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import admits


def refuse_unsupported(scheduler: Any, name: str, options: FeatherOptions) -> None:
    """Raise ``FeatherError`` for a server configuration that feather policies, or these options, do not support."""
    args = scheduler.server_args
    for unsupported, flag in (
        (getattr(args, "pp_size", 1) > 1, "--pp-size above 1"),
        (getattr(args, "disaggregation_mode", "null") != "null", "--disaggregation-mode"),
        (getattr(args, "speculative_algorithm", None) is not None, "--speculative-algorithm"),
        (getattr(args, "enable_dp_attention", False), "--enable-dp-attention"),
        (getattr(args, "dllm_algorithm", None) is not None, "--dllm-algorithm"),
        (getattr(args, "disable_radix_cache", False), "--disable-radix-cache"),
    ):
        if unsupported:
            raise FeatherError(f"--schedule-policy {name} does not support {flag}; drop it or choose another policy")
    if options.pace and not admits(name):
        raise FeatherError(
            f"--schedule-policy {name} leaves admission to SGLang, so --feather-pace cannot work; drop it"
        )
    if options.pace and mixes_chunks(args):
        raise FeatherError("--feather-pace saves nothing under --enable-mixed-chunk, where decode goes on; drop one")
    decision_file(scheduler)  # before anything is changed


def mixes_chunks(server_args: Any) -> bool:
    """Whether prefill chunks and decode rows share a step, so that prefill makes nobody wait."""
    return getattr(server_args, "enable_mixed_chunk", False)


def decision_file(scheduler: Any) -> Path | None:
    """Where this rank's decisions go, if anywhere; raises ``FeatherError`` if they cannot."""
    ranks = getattr(scheduler, "ps", None) or get_parallel()  # since 0.5.21
    return log_file(ranks.tp_rank, ranks.dp_rank)
