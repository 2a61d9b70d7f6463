"""Which policies are compared, and with which options: the same for both engines."""

from __future__ import annotations

import argparse
from typing import Any

from feather_sglang.adapter.hooks import installed_version, lacks_policy
from feather_sglang.errors import FeatherError
from feather_sglang.replay.arguments import common_options, feather_options, suited
from feather_sglang.scheduling.policies import load_policy
from feather_sglang.scheduling.policy_names import FEATHER, REPLAYED, STOCK

DEFAULT_POLICIES = "fcfs,lpm,dfs-weight,hrrn,feather-order,feather"  # without what SGLang is too old for


def chosen_policies(args: argparse.Namespace) -> list[str]:
    """The policies that ``--policies`` names, or else those of the default that the installed SGLang has."""
    if args.policies is None:
        version = installed_version()
        return [name for name in DEFAULT_POLICIES.split(",") if not lacks_policy(version, name)]
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    for name in REPLAYED:
        if args.engine == "server" and name in policies:
            raise FeatherError(
                f"--policies {args.policies}: no server has {name}; leave it out, or use --engine replay"
            )
    known = (*STOCK, *FEATHER) if args.engine == "server" else (*STOCK, *REPLAYED, *FEATHER)
    unknown = [name for name in policies if name not in known]
    if unknown or not policies:
        raise FeatherError(f"--policies {args.policies}: unknown {unknown or 'empty list'}; choose from {known}")
    if len(set(policies)) < len(policies):
        raise FeatherError(f"--policies {args.policies}: a policy is named twice")
    return policies


def options_of(args: argparse.Namespace, policies: list[str]) -> dict[str, dict[str, Any]]:
    """What FEATHER_OPTIONS holds for each policy; the policy file goes to the policy that it was trained for."""
    options = common_options(args)
    by_policy: dict[str, dict[str, Any]] = {name: suited(name, options) for name in policies}
    if path := feather_options(args).policy_file:
        kind = load_policy(path).name
        takers = [name for name in policies if name in (f"feather-{kind}", "feather" if kind == "bandit" else "")]
        if not takers:
            raise FeatherError(f"{path} holds a {kind} policy; --policies names no feather-{kind}")
        for name in takers:
            by_policy[name]["policy_file"] = path
    return by_policy
