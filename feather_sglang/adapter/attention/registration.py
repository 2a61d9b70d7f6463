"""The attention backend ``pat`` among SGLang's own: its name, its flags, and how its start-up ends when it cannot."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from feather_sglang.adapter.attention.beside import CHOICE, DRAFT, DRAFT_FLAG, DRAFTS_BY_PAT, PAT, resolve_beside
from feather_sglang.adapter.environment import DISABLE, disabled
from feather_sglang.adapter.failures import refusals_end_start_up
from feather_sglang.adapter.hooks import installed_version, require_fit, untested
from feather_sglang.adapter.options import packs_prefill
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import FEATHER

logger = logging.getLogger(__name__)

FLAGS = ("attention_backend", "decode_attention_backend", DRAFT)


def offer_backend(parser: Any) -> None:
    """Offer ``pat`` wherever it can serve decoding; ``--prefill-attention-backend`` goes on refusing it."""
    for action in parser._actions:
        if action.dest in FLAGS and action.choices is not None:
            action.choices = [*action.choices, PAT]


def resolve(original: Any, args: Any) -> Any:
    """Let SGLang resolve its flags, and choose the backends for prefill and beside pat (around the method)."""
    if disabled():
        _leave_out(args)
        return original(args)
    with refusals_end_start_up():
        _refuse_contradictions(args)
        if args.attention_backend == PAT:
            args.attention_backend, args.decode_attention_backend = None, PAT
        return resolve_beside(original, args)


def construct(original: Any, args: Any) -> Any:
    """The same where arguments are resolved as they are made (around ``__post_init__``)."""
    return original(args) if hasattr(type(args), "resolve_once") else resolve(original, args)


def _leave_out(args: Any) -> None:
    """Put SGLang's own in the place of the policy and the backend that the flags name."""
    write = super(type(args), args).__setattr__  # arguments are sealed by their class once they are resolved
    for name, own in (("schedule_policy", "fcfs"), *((name, None) for name in FLAGS)):
        if (given := getattr(args, name, None)) in (*FEATHER, PAT):
            logger.warning("feather: %s is set: --%s %s is left out", DISABLE, name.replace("_", "-"), given)
            write(name, own)


def _refuse_contradictions(args: Any) -> None:
    if args.prefill_attention_backend == PAT:
        raise FeatherError("--prefill-attention-backend pat: pat decodes only; drop the flag, or name another backend")
    if args.attention_backend == PAT and args.decode_attention_backend not in (None, PAT):
        raise FeatherError(
            f"--attention-backend pat decodes only, and --decode-attention-backend is {args.decode_attention_backend}: "
            "drop one of the two"
        )
    if getattr(args, DRAFT, None) != PAT:
        return
    if PAT not in (args.attention_backend, args.decode_attention_backend):
        raise FeatherError(f"{DRAFT_FLAG} pat needs --decode-attention-backend pat; give that, too, or drop it")
    if (args.speculative_algorithm or "NGRAM").upper() == "NGRAM":
        raise FeatherError(f"{DRAFT_FLAG} pat: there is no draft model; drop it")


def create_backend(runner: Any) -> Any:
    """The backend of one model runner, or the end of start-up with one clear line."""
    with refusals_end_start_up():
        require_fit("--decode-attention-backend pat", PAT)
        if warning := untested(installed_version()):
            logger.warning("feather: %s", warning)
        if PAT in (runner.server_args.attention_backend, runner.server_args.prefill_attention_backend):
            raise FeatherError("SGLang would prefill with pat, as a hook did not work; use --decode-attention-backend")
        if importlib.util.find_spec("feather_kernels") is None:
            raise FeatherError("the pat backend needs the package feather_kernels: reinstall feather-sglang")
        from feather_sglang.adapter.attention.backend import backend_of
        from feather_sglang.adapter.attention.metrics import pat_metrics

        backend = runner.feather_pat = backend_of(runner)
        if getattr(runner.server_args, DRAFTS_BY_PAT, False):
            from feather_sglang.adapter.attention.draft_model import draft_by_pat

            draft_by_pat()
        if packs_prefill():
            from feather_sglang.adapter.attention.packed_prefill.backend import pack_prefill

            pack_prefill()
    if (metrics := pat_metrics()) is not None:
        metrics.layers.labels(PAT).set(len(backend.packed.layers))
        if backend.packed.others:
            metrics.layers.labels(getattr(runner.server_args, CHOICE, None)).set(backend.packed.others)
    logger.info("feather: pat is active (sglang %s): %s", installed_version(), backend.packed.verdict)
    return backend


def register_backend() -> None:
    """Put ``pat`` into SGLang's registry; nothing is built, or imported, until a server asks for it.

    An SGLang without this registry still runs the policies: ``check_server_args`` refuses ``pat`` there.
    """
    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError:
        return
    register_attention_backend(PAT)(create_backend)
