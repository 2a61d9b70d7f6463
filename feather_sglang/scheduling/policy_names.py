"""The schedule policies that a server takes, SGLang's own and those of this plugin, and what a replay takes besides."""

STOCK = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "lof", "random")
SINCE = {"hrrn": "0.5.20", "shortest-prefill-first": "0.5.21"}  # the first SGLang that has it; the others are older
K_LPM = "k-lpm"  # no server has it: a baseline of the replay alone
FEATHER = ("feather", "feather-heuristic", "feather-bandit", "feather-qlearning", "feather-order")
SWITCH_PATH = "/feather/schedule_policy"  # where a running server takes another of these names
