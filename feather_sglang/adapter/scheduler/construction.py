"""The parts of a feather scheduler, made from the server's arguments and the options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.refusals import mixes_chunks, resolved
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.deferrals import PrefixBatching
from feather_sglang.scheduling.admission.forecast import KVForecast, Outlook
from feather_sglang.scheduling.admission.gate import LONGEST, SHARE, PrefillDelay
from feather_sglang.scheduling.admission.overtaking import Overtaking
from feather_sglang.scheduling.admission.work import Work
from feather_sglang.scheduling.policies import StopPolicy, load_policy, make_policy
from feather_sglang.scheduling.policy_names import POLICY_NAMES, admits
from feather_sglang.scheduling.prefill_bound.prefill_bound import PrefillBound
from feather_sglang.scheduling.prefill_bound.promise import Promise
from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from feather_sglang.slo import parse

logger = logging.getLogger(__name__)


def make_stop_policy(name: str, options: FeatherOptions) -> StopPolicy | None:
    """The stop policy behind a server policy name, from its policy file if one is set."""
    kind = POLICY_NAMES[name]
    if kind is None:
        if options.policy_file:
            raise FeatherError(f"--schedule-policy {name} has no policy to load {options.policy_file} into; drop it")
        return None
    if not options.policy_file:
        policy = make_policy(kind, seed=options.seed)
    else:
        policy = load_policy(options.policy_file, seed=options.seed)
        if policy.name != kind:
            raise FeatherError(
                f"{options.policy_file}: holds a {policy.name} policy, --schedule-policy {name} needs {kind}"
            )
    if not options.explore:
        policy.explore = False
    return policy


def make_admission(
    scheduler: Any,
    name: str,
    options: FeatherOptions,
    policy: StopPolicy | None,
    *,
    seed: int,
    outlook_of: Callable[[Hashable], Outlook],
) -> Admission:
    """Return the admission of a scheduler that runs the policy ``name``.

    Parameters
    ----------
    policy : from ``make_stop_policy``.
    seed : of the tree's hashes; the same on every rank.
    outlook_of : gives a request's lengths.
    """
    bound = prefill_delay_bound(scheduler.server_args, name, options)
    batching = make_prefix_batching(scheduler, options) if policy is not None else None
    return Admission(
        ChunkedHashTree(options.chunk_size, seed=seed),
        policy,
        max_wait=options.max_wait,
        max_wait_rounds=options.max_wait_rounds,
        prefix_batching=batching,
        forecast=make_forecast(scheduler) if batching is not None else None,
        outlook_of=outlook_of,
        prefill_delay=PrefillDelay(bound, SHARE if options.pace is None else 0.0) if bound else None,
        overtaking=Overtaking(options.max_overtaking),
        work=Work(scheduler.max_total_num_tokens),
    )


def make_prefill_bound(options: FeatherOptions) -> PrefillBound | None:
    """What bounds prefill while requests decode; None where nobody asked for it."""
    if options.tbt is None and options.slo is None:
        return None
    slo = parse(options.slo) if options.slo is not None else None
    promise = Promise(slo, None if options.tbt is None else options.tbt / 1e3)
    return PrefillBound(promise, lambda line: logger.info("feather: %s", line))


def make_prefix_batching(scheduler: Any, options: FeatherOptions) -> PrefixBatching | None:
    """What lets prefixes wait where memory is short; None where it is off or cannot be."""
    # Of a model with recurrent state a cached prefix can be used only where its state was kept, too.
    if not options.gather or getattr(scheduler, "is_hybrid_ssm", False):
        return None
    return PrefixBatching(scheduler.max_total_num_tokens)


def make_forecast(scheduler: Any) -> KVForecast | None:
    """What looks ahead at memory; None where the pool is not the one that fills."""
    # With sliding windows there is a second pool, in which nobody holds more than a window.
    if getattr(scheduler, "is_hybrid_swa", False):
        return None
    # Under overlap the next step is launched before the last one has told who ended in it.
    late_steps = int(scheduler.enable_overlap) + _slots_for_drafts(scheduler.server_args)
    return KVForecast(scheduler.page_size, late_steps)


def _slots_for_drafts(args: Any) -> int:
    """What a request holds beyond its tokens while it is drafted for: SGLang keeps two steps' worth."""
    if resolved(args, "speculative_algorithm") is None:
        return 0
    drafts, steps, branches = (
        resolved(args, f"speculative_{name}") or 1 for name in ("num_draft_tokens", "num_steps", "eagle_topk")
    )
    return 2 * max(drafts, steps * branches)


def prefill_delay_bound(server_args: Any, name: str, options: FeatherOptions) -> float:
    """Seconds that a round is delayed at most; what nobody asked for is off where it cannot work."""
    if options.pace is not None:
        return options.pace
    return LONGEST if admits(name) and not mixes_chunks(server_args) else 0.0
