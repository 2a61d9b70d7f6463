"""The policies to compare and their options, the same for both engines."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from feather_sglang.adapter.hooks import installed_version, lacks_policy
from feather_sglang.errors import FeatherError
from feather_sglang.replay.arguments import common_options, feather_options, suited
from feather_sglang.scheduling.policies import load_policy
from feather_sglang.scheduling.policy_names import FEATHER, PROMISING, REPLAYED, STOCK

DEFAULT_POLICIES = "fcfs,lpm,dfs-weight,hrrn,feather-order,feather"  # without what SGLang is too old for


def split(text: str) -> list[str]:
    """The names in a value of ``--policies``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def named(text: str, known: Sequence[str]) -> list[str]:
    """The policies that a value of ``--policies`` names, all of them known."""
    names = split(text)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise FeatherError(f"--policies {text}: unknown {unknown or 'empty list'}; choose from {known}")
    return names


def available(names: Iterable[str]) -> list[str]:
    """Those that the installed SGLang has."""
    version = installed_version()
    return [name for name in names if not lacks_policy(version, name)]


def chosen_policies(args: argparse.Namespace) -> list[str]:
    """The policies that ``--policies`` names, or else those of the default that the installed SGLang has."""
    if args.policies is None:
        return available(DEFAULT_POLICIES.split(","))
    on_server = args.engine == "server"
    if on_server and (replayed := [name for name in split(args.policies) if name in REPLAYED]):
        raise FeatherError(
            f"--policies {args.policies}: no server has {replayed[0]}; leave it out, or use --engine replay"
        )
    policies = named(args.policies, (*STOCK, *(() if on_server else REPLAYED), *FEATHER, PROMISING))
    if len(set(policies)) < len(policies):
        raise FeatherError(f"--policies {args.policies}: a policy is named twice")
    if PROMISING in policies and (args.slo is None or args.slo.ttft is None or args.slo.tbt is None):
        raise FeatherError(
            f"--policies {args.policies}: {PROMISING} promises the bounds of --slo: give ttft and tbt there"
        )
    return policies


def options_of(args: argparse.Namespace, policies: list[str]) -> dict[str, dict[str, Any]]:
    """What FEATHER_OPTIONS holds for each policy; the policy file goes to the policy that it was trained for."""
    options = common_options(args)
    by_policy: dict[str, dict[str, Any]] = {name: suited(name, options) for name in policies}
    if PROMISING in by_policy:
        by_policy[PROMISING]["slo"] = args.slo.text
    if path := feather_options(args).policy_file:
        kind = load_policy(path).name
        takers = [
            name
            for name in policies
            if name in (f"feather-{kind}", *(("feather", PROMISING) if kind == "bandit" else ()))
        ]
        if not takers:
            raise FeatherError(f"{path} holds a {kind} policy; --policies names no feather-{kind}")
        for name in takers:
            by_policy[name]["policy_file"] = path
    return by_policy
