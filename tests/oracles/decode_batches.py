"""Decode batches as they were measured, for tests of the step-time model."""

from __future__ import annotations

import random

from feather_sglang.replay.batch_sharing import BatchSharing
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel


def step_model(profile: str, kernel: str | None = None, model: str = "llama3-8b") -> StepTimeModel:
    return StepTimeModel(load_profile(profile), load_model(model), kernel)


def grouped(rows: int, prefix: int, groups: int, own: int = 120, order: str = "grouped", seed: int = 0):
    """Return lengths and sharing of `rows` rows in `groups` prefix groups of equal share."""
    members = [row % groups for row in range(rows)]
    if order == "grouped":
        members.sort()
    elif order == "shuffled":
        random.Random(seed).shuffle(members)
    lengths = [prefix + own] * rows
    return lengths, BatchSharing.from_paths([(g, groups + i) for i, g in enumerate(members)], prefix, lengths)
