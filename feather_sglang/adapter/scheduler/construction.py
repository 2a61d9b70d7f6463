"""The parts of a feather scheduler, made from the server's arguments and the options."""

from __future__ import annotations

from typing import Any

from feather_sglang.adapter.options import FeatherOptions
from feather_sglang.adapter.scheduler.checks import mixes_chunks
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.admission.gathering import Gathering
from feather_sglang.scheduling.admission.kv_forecast import KVForecast
from feather_sglang.scheduling.admission.pacing import BOUND
from feather_sglang.scheduling.policies import StopPolicy, load_policy, make_policy
from feather_sglang.scheduling.policy_names import POLICY_NAMES, admits


def make_stop_policy(name: str, options: FeatherOptions) -> StopPolicy | None:
    """The stop policy behind a server policy name, from its policy file if one is set."""
    kind = POLICY_NAMES[name]
    if kind is None:
        if options.policy_file:
            raise FeatherError(f"--schedule-policy {name} has no policy to load {options.policy_file} into; drop it")
        return None
    if not options.policy_file:
        parameters: dict[str, Any] = {} if kind == "heuristic" else {"features": options.features}
        policy = make_policy(kind, seed=options.seed, **parameters)
    else:
        policy = load_policy(options.policy_file, seed=options.seed)
        if policy.name != kind:
            raise FeatherError(
                f"{options.policy_file}: holds a {policy.name} policy, --schedule-policy {name} needs {kind}"
            )
    if not options.explore:
        policy.explore = False
    return policy


def make_gathering(scheduler: Any, options: FeatherOptions) -> Gathering | None:
    """What lets prefixes wait where memory is short; None where it is off or cannot be."""
    # Looking up a prefix in the cache of a model with recurrent state takes one of the few places for such states.
    if not options.gather or getattr(scheduler, "is_hybrid_ssm", False):
        return None
    return Gathering(scheduler.max_total_num_tokens)


def make_forecast(scheduler: Any) -> KVForecast | None:
    """What looks ahead at memory; None where the pool is not the one that fills."""
    # With sliding windows there is a second pool, in which nobody holds more than a window.
    if getattr(scheduler, "is_hybrid_swa", False):
        return None
    # Under overlap the next step is launched before the last one has told who ended in it.
    return KVForecast(scheduler.page_size, late_steps=int(scheduler.enable_overlap))


def pace_bound(server_args: Any, name: str, options: FeatherOptions) -> float:
    """Seconds that a round is held at most; what nobody asked for is off where it cannot work."""
    if options.pace is not None:
        return options.pace
    return BOUND if admits(name) and not mixes_chunks(server_args) else 0.0
