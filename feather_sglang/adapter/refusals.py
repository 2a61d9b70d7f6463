"""Refusals that follow from a server's flags alone, as data, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from feather_sglang.adapter.options import FeatherOptions, flag_of, packs_prefill
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import admits

REFERENCE = "FEATHER_PAT_REFERENCE"  # lets pat run on a CPU, for tests
DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")  # of drafts that are served
ANOTHER_BACKEND = "choose another --decode-attention-backend"


class Limit(NamedTuple):
    """Something that is not served: what it is, whether it is there, and what it is called in the support matrix.

    ``what`` may have fields of the subject in braces; ``instead`` is what to do about a flag.
    """

    what: str
    holds: Callable[[Any], bool]
    name: str = ""
    instead: str = "drop it"

    @property
    def title(self) -> str:
        """Its name in the support matrix."""
        return self.name or self.what


def resolved(args: Any, name: str) -> Any:
    """A flag as SGLang has resolved it: its last declaration, or else the field; None where it is not known."""
    for _, declared in reversed(getattr(args, "_resolved_overrides", None) or ()):
        if name in declared:
            return declared[name]
    return getattr(args, name, None)


class _Resolved:
    """A subject whose flags are read as SGLang has resolved them."""

    def __init__(self, subject: Any) -> None:
        self._subject = subject

    def __getattr__(self, name: str) -> Any:
        return resolved(self._subject, name)


def first_limit(limits: Iterable[Limit], subject: Any) -> Limit | None:
    """The first limit that holds, with the subject's fields filled in, or None."""
    limit = next((limit for limit in limits if limit.holds(subject)), None)
    return limit and limit._replace(what=limit.what.format(_Resolved(subject)))


def attention_data_parallel(args: Any) -> bool:
    """Whether attention ranks have batches of their own: since SGLang 0.5.22 ``--attn-dp-size`` says so, too."""
    return bool(getattr(args, "enable_dp_attention", False)) or (resolved(args, "attn_dp_size") or 1) > 1


def _drafts_by(args: Any) -> str | None:
    """The speculative algorithm, by the name in SGLang's flag."""
    name = resolved(args, "speculative_algorithm")
    return name and name.upper()


def _drafts_trees(args: Any) -> bool:
    return _drafts_by(args) is not None and (resolved(args, "speculative_eagle_topk") or 1) > 1


OTHER_DRAFTERS = Limit(
    "--speculative-algorithm {0.speculative_algorithm}",
    lambda args: _drafts_by(args) not in (None, *DRAFTERS),
    f"--speculative-algorithm other than {', '.join(DRAFTERS)}",
)


def _replays_packed_prefill(args: Any) -> bool:
    graphs = resolved(args, "cuda_graph_config")
    replays = graphs is not None and graphs.prefill.backend != "disabled"
    return replays and packs_prefill()


def _given(flag: str, what: str | None = None) -> Limit:
    """The limit of a flag that is off by default; older releases lack some."""
    field = flag.removeprefix("--").replace("-", "_")
    return Limit(what or flag, lambda args: bool(resolved(args, field)), flag)


# Older releases lack some arguments, and stand-ins leave most out.
PIPELINE = Limit("--pp-size above 1", lambda args: getattr(args, "pp_size", 1) > 1)
DISAGGREGATION = Limit("--disaggregation-mode", lambda args: getattr(args, "disaggregation_mode", "null") != "null")
_DIFFUSION = _given("--dllm-algorithm")
POLICY_FLAGS = (
    PIPELINE,
    DISAGGREGATION,
    OTHER_DRAFTERS,
    Limit(  # whose ranks have one batch in no group of SGLang's
        "data-parallel attention with --attn-cp-size above 1",
        lambda args: attention_data_parallel(args) and (resolved(args, "attn_cp_size") or 1) > 1,
    ),
    _DIFFUSION,
    _given("--disable-radix-cache"),
)
PAT_FLAGS = (
    PIPELINE,
    DISAGGREGATION,
    OTHER_DRAFTERS,
    Limit(
        "trees of n-grams",
        lambda args: _drafts_by(args) == "NGRAM" and getattr(args, "speculative_ngram_max_bfs_breadth", 1) > 1,
        "trees of n-grams (served with --speculative-ngram-max-bfs-breadth 1)",
        "give --speculative-ngram-max-bfs-breadth 1",  # without the flag SGLang chooses trees
    ),
    Limit(
        "trees of drafts",
        _drafts_trees,
        "trees of drafts (served with --speculative-eagle-topk 1)",
        "give --speculative-eagle-topk 1",  # here, too, for some models
    ),
    _given("--speculative-adaptive"),
    _given("--enable-multi-layer-eagle"),
    _DIFFUSION,
    Limit(  # not tried
        "data-parallel attention with speculative decoding",
        lambda args: attention_data_parallel(args) and _drafts_by(args) is not None,
    ),
    _given("--enable-two-batch-overlap"),
    _given("--enable-pdmux"),
    _given("--enable-hisparse"),
    _given(
        "--enable-deterministic-inference",
        "--enable-deterministic-inference, as the order of a request's sums depends on the requests that share its "
        "prefix and on the number of processors",
    ),
    _given("--enable-unified-memory"),  # slots are ids, translated anew whenever what they stand for has moved
    # Pages are no rows of slots there. SGLang 0.5.23 has it with unified memory only.
    _given("--enable-page-major-kv-layout"),
    Limit(
        "--feather-pat-prefill in prefill CUDA graphs",
        _replays_packed_prefill,
        instead="add --disable-prefill-cuda-graph",
    ),
    Limit(  # not tried: ranks pad their prompts to each other's
        "--feather-pat-prefill under data-parallel attention",
        lambda args: packs_prefill() and attention_data_parallel(args),
    ),
)


def refuse_policy_flags(args: Any, name: str, options: FeatherOptions) -> None:
    """Raise ``FeatherError`` for flags that the feather policy ``name``, or these options, do not support."""
    if limit := first_limit(POLICY_FLAGS, args):
        raise FeatherError(
            f"--schedule-policy {name} does not support {limit.what}; {limit.instead} or choose another policy"
        )
    for option in ("pace", "tbt", "slo"):
        if not getattr(options, option):
            continue
        flag = flag_of(option)
        if not admits(name):
            raise FeatherError(f"--schedule-policy {name} leaves admission to SGLang, so {flag} cannot work; drop it")
        if mixes_chunks(args) and option == "pace":
            raise FeatherError(f"{flag} saves nothing, as decode goes on under --enable-mixed-chunk; drop one")
        if mixes_chunks(args):
            raise FeatherError(f"{flag} makes prefill and decode alternate, not mix (--enable-mixed-chunk); drop one")
        if option != "pace" and (args.chunked_prefill_size or 0) < 0:
            raise FeatherError(f"{flag} cuts prompts into chunks, and --chunked-prefill-size -1 forbids it; drop one")


def mixes_chunks(args: Any) -> bool:
    """Whether prefill chunks and decode rows share a step, so that no request waits for prefill."""
    return getattr(args, "enable_mixed_chunk", False)


def refuse_pat_flags(args: Any) -> None:
    """Raise ``FeatherError`` for flags that the pat backend does not support."""
    if args.device == "cpu" and os.environ.get(REFERENCE) != "1":
        raise FeatherError(f"the pat backend needs an NVIDIA GPU, and this server runs on the CPU: {ANOTHER_BACKEND}")
    if limit := first_limit(PAT_FLAGS, args):
        raise FeatherError(f"the pat backend does not support {limit.what}; {limit.instead} or {ANOTHER_BACKEND}")
