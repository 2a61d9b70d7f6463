"""The schedule policies of servers, SGLang's own and this plugin's, and the further ones of replays."""

STOCK = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "lof", "random")
SINCE = {"hrrn": "0.5.20", "shortest-prefill-first": "0.5.21"}  # the first SGLang that has it; the others are older
K_LPM = "k-lpm"  # no server has these: a baseline, and feather where batches never mix groups, which it is told
ORACLE = "oracle"
REPLAYED = (K_LPM, ORACLE)
SWITCH_PATH = "/feather/schedule_policy"  # where a running server takes another of these names
# Server policy name -> stop policy; None is prefix row order alone, with first-come-first-served admission.
POLICY_NAMES: dict[str, str | None] = {
    "feather": "bandit",
    "feather-heuristic": "heuristic",
    "feather-bandit": "bandit",
    "feather-qlearning": "qlearning",
    "feather-order": None,
}
FEATHER = tuple(POLICY_NAMES)
PROMISING = f"{FEATHER[0]}+slo"  # in comparisons: feather, told of the bounds that it is judged by


def served(name: str) -> str:
    """The policy that a server is told, of one that a comparison names."""
    return FEATHER[0] if name == PROMISING else name


def admits(name: str) -> bool:
    """Whether that policy decides who is admitted, and does not leave it to SGLang."""
    return POLICY_NAMES[name] is not None
