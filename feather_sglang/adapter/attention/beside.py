"""The backend beside pat: SGLang's own for the layers that pat does not pack, in the same step.

Which one is SGLang's own choice: its flags are resolved as if pat had not been asked for (`resolve_beside`), and what
it would decode with then is remembered in them. ``--feather-pat-beside`` names another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.refusals import resolved
from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)

PAT = "pat"
CHOICE = "_feather_beside"  # on SGLang's arguments, which take it along to other processes
DRAFTS_BY_PAT = "_feather_drafts_by_pat"  # the same: ``--speculative-draft-attention-backend pat``
DRAFT, DRAFT_FLAG = "speculative_draft_attention_backend", "--speculative-draft-attention-backend"
COARSE_BARRIER = "SGLANG_FORCE_COARSE_WAR_BARRIER"
READS_BEFORE_REPLAY = ("fa3", "fa4", "flashinfer", "triton")  # whose graphs read no table of SGLang's


def resolve_beside(original: Callable[..., Any], args: Any) -> Any:
    """Resolve SGLang's flags with the backend beside pat in pat's place, then put pat back (around the method)."""
    if args.decode_attention_backend != PAT or hasattr(args, CHOICE):
        return original(args)
    write = super(type(args), args).__setattr__  # arguments are sealed by their class once they are resolved
    named = _named()
    write("decode_attention_backend", named)
    if getattr(args, DRAFT, None) == PAT:  # its decode steps; the draft model's prefill is another's
        setattr(args, DRAFTS_BY_PAT, True)
        write(DRAFT, None)
    try:
        result = original(args)
        if chosen := resolved(args, "decode_attention_backend") or resolved(args, "attention_backend"):
            setattr(args, CHOICE, chosen)
    except (AssertionError, ValueError) as error:
        said = " ".join(str(error).split())
        if named is None or named.replace("_", " ") not in said.lower().replace("_", " "):
            raise
        raise FeatherError(f"--feather-pat-beside {named}: {said}") from None
    finally:
        write("decode_attention_backend", PAT)
    declarations = getattr(args, "_resolved_overrides", None)
    if declarations is not None:  # where these are read instead of the fields
        declarations.append(("feather", {"decode_attention_backend": PAT}))
    # A draft model decodes in steps of its own, which SGLang has for its own backends only.
    if resolved(args, "speculative_algorithm") is not None and resolved(args, DRAFT) is None:
        write(DRAFT, getattr(args, CHOICE, None))
        if declarations is not None:
            declarations.append(("feather", {DRAFT: getattr(args, CHOICE, None)}))
    return result


def _named() -> str | None:
    """``--feather-pat-beside``, if SGLang knows it."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = FeatherOptions.from_environment().pat_beside
    if name is not None and (name == PAT or name not in ATTENTION_BACKENDS):
        known = ", ".join(sorted(set(ATTENTION_BACKENDS) - {PAT}))
        raise FeatherError(f"--feather-pat-beside {name}: SGLang has no such backend for decoding; it has {known}")
    return name


def create_beside(runner: Any, layers: int) -> Any:
    """SGLang's decode backend for the ``layers`` layers that pat does not pack; None where it packs all."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if not layers:
        if named := FeatherOptions.from_environment().pat_beside:
            logger.warning("feather: pat packs all layers of this model, so --feather-pat-beside %s is unused", named)
        return None
    name = getattr(runner.server_args, CHOICE, None)
    if name is None:
        raise FeatherError(
            "SGLang resolved its flags before feather was loaded, so the backend beside pat is "
            "unknown: name it with --feather-pat-beside, or use another --decode-attention-backend"
        )
    logger.info("feather: the attention backend %s decodes the %d layers that pat does not pack", name, layers)
    _wait_for_late_reads(name)
    try:
        return ATTENTION_BACKENDS[name](runner)
    except Exception as error:  # whatever another backend lacks
        raise FeatherError(
            f"{name} cannot decode beside pat ({type(error).__name__}: {' '.join(str(error).split())}): name another "
            "backend with --feather-pat-beside, or use another --decode-attention-backend"
        ) from error


def _wait_for_late_reads(name: str) -> None:
    """Where backends cannot say when they are done with SGLang's tables, let it wait for whole steps.

    Else it would write to them for the next step as soon as a CUDA graph's replay begins, in which some read.
    """
    from sglang.srt.layers.attention import base_attn_backend

    if not hasattr(base_attn_backend, "SharedReadEnds") and name not in READS_BEFORE_REPLAY:
        os.environ[COARSE_BARRIER] = "1"
