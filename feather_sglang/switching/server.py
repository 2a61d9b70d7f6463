"""A server that runs, as ``feather switch`` sees it: its metrics, its policy, and orders to change it."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.scheduling.policy_names import FEATHER, SWITCH_PATH
from feather_sglang.switching.metrics import Totals, totals

ANSWERS_WITHIN = 30.0  # seconds; an order has no limit, as it waits for running requests
_KEY = "the server refused the admin key"
# Statuses of an order that changed nothing, and why where the server does not say it.
UNCHANGED = {400: "", 401: _KEY, 403: _KEY, 404: "the server cannot switch: start it with --feather-allow-switch"}


class HTTPRefusal(FeatherError):
    """An answer with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Refused(HTTPRefusal):
    """An order that was refused and changed nothing."""


class Superseded(FeatherError):
    """Another order came after this command's: what that chose is in force."""


class InForce(NamedTuple):
    """A policy, and the options of a feather policy."""

    policy: str
    options: dict[str, Any]


class RunningServer:
    """The server at that URL; `api_key` is for reading where it wants another key than the admin's."""

    def __init__(self, url: str, admin_key: str, api_key: str | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise FeatherError(f"{quoted(url, 100)} is no address of a server: expected http://HOST:PORT")
        self.admin_key, self.api_key = admin_key, api_key or admin_key

    def totals(self) -> Totals:
        """What ``/metrics`` says now."""
        try:
            return totals(self._ask("/metrics", self.api_key))
        except HTTPRefusal as refusal:
            if refusal.status != 404:
                raise
            raise FeatherError(f"{self.url} has no /metrics: start the server with --enable-metrics") from None

    def in_force(self) -> InForce:
        """Its policy; ``FeatherError`` where that failed, or cannot be told."""
        try:
            states = [one["feather"] for one in json.loads(self._ask("/server_info", self.api_key))["internal_states"]]
            found = [InForce(one["schedule_policy"], one.get("options", {})) for one in states]
        except HTTPRefusal as refusal:
            what = "wants a key: give --api-key" if refusal.status == 401 else f"has no /server_info ({refusal})"
            raise FeatherError(f"{self.url} {what}") from None
        except (ValueError, LookupError, TypeError):
            raise FeatherError(
                f"{self.url} does not say its policy: start it with the plugin and --feather-allow-switch"
            ) from None
        if any(one != found[0] for one in found[1:]) or not found:
            raise FeatherError(f"replicas run different policies ({', '.join(one.policy for one in found)})")
        if any(state.get("failed") for state in states):
            raise FeatherError(f"the policy {found[0].policy} failed and the server goes on as fcfs; see its log")
        return found[0]

    def check_orders(self) -> None:
        """Raise ``FeatherError`` where it would take no order, found by one that is none."""
        try:
            self._order({})
        except Refused as refusal:
            if refusal.status != 400:
                raise

    def order(self, wanted: InForce) -> None:
        """Change its policy, once no request runs where that is needed; ``Refused`` where nothing was changed."""
        options = {"options": wanted.options} if wanted.policy in FEATHER else {}
        self._compare(self._order({"schedule_policy": wanted.policy, "drain": True, **options}), wanted)

    def check_runs(self, wanted: InForce) -> None:
        """Raise ``Superseded`` where it runs another policy by now; ``FeatherError`` where its policy failed."""
        self._compare({"schedule_policy": self.in_force().policy}, wanted)

    def _compare(self, found: dict[str, Any], wanted: InForce) -> None:
        if (policy := found.get("schedule_policy")) != wanted.policy:
            raise Superseded(f"{self.url} runs {policy}: another order came meanwhile")

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            return dict(json.loads(self._ask(SWITCH_PATH, self.admin_key, json.dumps(order).encode(), None)))
        except HTTPRefusal as refusal:
            if refusal.status not in UNCHANGED:  # 409: some replicas may have switched
                raise
            raise Refused(refusal.status, UNCHANGED[refusal.status] or str(refusal)) from None
        except (ValueError, TypeError):
            raise FeatherError(f"{self.url}{SWITCH_PATH} gave no answer of this plugin") from None

    def _ask(self, path: str, key: str, body: bytes | None = None, timeout: float | None = ANSWERS_WITHIN) -> str:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=timeout) as got:
                return str(got.read().decode(errors="replace"))
        except HTTPError as refusal:
            raise HTTPRefusal(refusal.code, f"{self.url}{path}: {_said(refusal)}") from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no port, or a key that no header can have
            raise FeatherError(f"{self.url}{path}: {getattr(error, 'reason', error)}") from None


def _said(refusal: HTTPError) -> str:
    """The reason that the server gave, in one line."""
    try:
        return str(json.loads(refusal.read(1 << 16))["error"]).partition("\n")[0][:300]
    except (OSError, ValueError, LookupError, TypeError):
        return f"status {refusal.code} {refusal.reason}"
