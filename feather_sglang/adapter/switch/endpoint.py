"""``POST /feather/schedule_policy``: the HTTP side of switching, and the needs of ``--feather-allow-switch``.

The route exists only on a server that was started with the flag, and SGLang's own check of keys guards it on the
level that lets nobody in without the admin key.
"""

from __future__ import annotations

import asyncio
from typing import Any

from feather_sglang.adapter.scheduler.state import STATE
from feather_sglang.adapter.switch.switch import Order
from feather_sglang.errors import FeatherError
from feather_sglang.scheduling.policy_names import SWITCH_PATH

FLAG = "--feather-allow-switch"
LARGEST = 1 << 16  # bytes of an order
DRAIN_POLL_SECONDS = 0.1


def refuse_unguarded(args: Any) -> None:
    """Raise ``FeatherError`` for a server on which the admin key would guard nothing."""
    if not getattr(args, "admin_api_key", None):
        raise FeatherError(f"{FLAG} needs --admin-api-key: only requests with this key may switch the policy")
    from sglang.srt.environ import envs

    for unsupported, flag in (
        (getattr(args, "tokenizer_worker_num", 1) > 1, "--tokenizer-worker-num above 1"),
        (getattr(args, "smg_grpc_mode", False), "--smg-grpc-mode"),
        (getattr(args, "grpc_mode", False), "--grpc-mode"),
        (envs.SGLANG_RUST_SERVER.get(), "SGLANG_RUST_SERVER"),
    ):
        if unsupported:
            raise FeatherError(f"{FLAG} does not support {flag}: the endpoint would be missing or without a key")


def add_endpoint() -> None:
    """Add the route to SGLang's HTTP application, before SGLang decides whether its keys must be checked."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app, get_global_state
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.requests import Request

    one_at_a_time = asyncio.Lock()

    @auth_level(AuthLevel.ADMIN_FORCE)
    async def schedule_policy(request: Request) -> JSONResponse:
        try:
            order = Order.from_json(await _body(request))
        except FeatherError as error:
            return JSONResponse({"error": str(error)}, 400)
        manager = get_global_state().tokenizer_manager
        async with one_at_a_time:
            status, answer = await send(order, manager)
        if status == 200 and order.drain:
            answer = await drained(manager)
        return JSONResponse(answer, status)

    app.add_route(SWITCH_PATH, schedule_policy, methods=["POST"])


async def _body(request: Any) -> bytes:
    """What was sent, of which no more is read than an order can have."""
    content = b""
    async for piece in request.stream():
        content += piece
        if len(content) > LARGEST:
            raise FeatherError(f"more than {LARGEST} bytes, which no order has")
    return content


async def send(order: Order, manager: Any) -> tuple[int, dict[str, str]]:
    """Give an order to all schedulers through the tokenizer manager; HTTP status and answer."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    switched = await manager.set_internal_state(SetInternalStateReq(server_args=order.as_message()))
    if all(switched):
        return 200, {"schedule_policy": order.schedule_policy}
    states = await _states(manager)
    refusals = [state.get("refused") for state in states]
    refused = next((refusal for refusal in refusals if refusal), None)
    if refused is None:
        return 500, {"error": "the schedulers did not take the order: the plugin is not active there; see the log"}
    if any(switched):  # replicas of --dp decide each for itself
        policies = ", ".join(str(state.get("schedule_policy")) for state in states)
        return 409, {"error": f"the replicas now run {policies}, as one refused ({refused['reason']}); order again"}
    return refused["status"], {"error": refused["reason"]}


async def drained(manager: Any) -> dict[str, str]:
    """The answer once no scheduler drains any more: the policy in force, of another order if one came meanwhile."""
    states = await _states(manager)
    while any(state.get("draining") for state in states):
        await asyncio.sleep(DRAIN_POLL_SECONDS)
        states = await _states(manager)
    return {"schedule_policy": ", ".join(sorted({str(state.get("schedule_policy")) for state in states}))}


async def _states(manager: Any) -> list[dict[str, Any]]:
    return [state.get(STATE) or {} for state in await manager.get_internal_state()]
