"""The stop decision as a gymnasium environment: an episode is a part of a trace, a step is one decision.

May import: adapter, replay, scheduling, simulation, errors.
"""

from feather_sglang.errors import FeatherError

try:
    import gymnasium  # noqa: F401
except ImportError:
    raise FeatherError("feather_sglang.gym needs gymnasium: pip install 'feather-sglang[gym]'") from None

from feather_sglang.gym.agents import behave, save_agent
from feather_sglang.gym.env import BatchFormationEnv

__all__ = ["BatchFormationEnv", "behave", "save_agent"]
