"""What the flags of a server alone tell that it cannot run, refused before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import admits

REFERENCE = "FEATHER_PAT_REFERENCE"  # lets pat run on a CPU, for tests
ANOTHER_BACKEND = "choose another --decode-attention-backend"


def refuse_policy_flags(args: Any, name: str, options: FeatherOptions) -> None:
    """Raise ``FeatherError`` for flags that the feather policy ``name``, or these options, do not support."""
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


def mixes_chunks(args: Any) -> bool:
    """Whether prefill chunks and decode rows share a step, so that prefill makes nobody wait."""
    return getattr(args, "enable_mixed_chunk", False)


def refuse_pat_flags(args: Any) -> None:
    """Raise ``FeatherError`` for flags that the pat backend does not support."""
    if args.device == "cpu" and os.environ.get(REFERENCE) != "1":
        raise FeatherError(f"the pat backend needs an NVIDIA GPU, this server runs on the CPU: {ANOTHER_BACKEND}")
    for unsupported, flag in (
        (args.pp_size > 1, "--pp-size above 1"),
        (args.disaggregation_mode != "null", "--disaggregation-mode"),
        (args.speculative_algorithm is not None, "--speculative-algorithm"),
        (args.dllm_algorithm is not None, "--dllm-algorithm"),
        (args.enable_dp_attention, "data-parallel attention"),
        (args.enable_two_batch_overlap, "--enable-two-batch-overlap"),
        (args.enable_pdmux, "--enable-pdmux"),
        (args.enable_hisparse, "--enable-hisparse"),
        (args.enable_deterministic_inference, "--enable-deterministic-inference"),
    ):
        if unsupported:
            raise FeatherError(f"the pat backend does not support {flag}; drop it or {ANOTHER_BACKEND}")
