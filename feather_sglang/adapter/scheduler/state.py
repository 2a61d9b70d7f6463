"""The policy's entry ``feather`` in ``/server_info``, in SGLang's internal state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from feather_sglang.adapter.wrapping import Wrappings

STATE = "feather"


def tell_state(scheduler: Any, more: Callable[[], dict[str, Any]] = dict) -> None:
    """Add the policy's state, and ``more``, to what a scheduler tells of itself.

    SGLang binds its handlers of messages after its policy is set up, so it binds this one.
    """

    def get_internal_state(original: Callable[..., Any], recv_req: Any) -> Any:
        output = original(recv_req)
        output.internal_state[STATE] = state_of(scheduler) | more()
        return output

    Wrappings().wrap(scheduler, "get_internal_state", get_internal_state)


def state_of(scheduler: Any) -> dict[str, Any]:
    """Plain data: the policy in force, and of a feather policy its options and what it has counted."""
    feather = getattr(scheduler, "feather", None)
    state = {"schedule_policy": scheduler.schedule_policy, "stops": 0}
    return state if feather is None else state | {"options": feather.options.of_policy(), **feather.stats()}
