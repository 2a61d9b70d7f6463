"""The schedule policies that a server takes: SGLang's own, and those of this plugin."""

STOCK = ("fcfs", "lpm", "dfs-weight", "hrrn", "lof", "random")
FEATHER = ("feather", "feather-heuristic", "feather-bandit", "feather-qlearning", "feather-order")
SWITCH_PATH = "/feather/schedule_policy"  # where a running server takes another of these names
