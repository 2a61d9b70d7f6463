"""The GPU's step times from logged steps: a base profile's rates, scaled to the server's times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from feather_sglang.calibrate.fit_host import GPU_BOUND_SECONDS, alike, gpu_seconds
from feather_sglang.calibrate.recording import Recording, Steps
from feather_sglang.compare.server.cases import parse_case
from feather_sglang.replay.attention_time import AttentionTime
from feather_sglang.replay.model_shape import ModelShape
from feather_sglang.replay.profiles import HardwareProfile
from feather_sglang.replay.step_time import StepTimeModel

LEAST_WAIT = 0.0005  # seconds that the host must have waited for a decode step: else the GPU may have been idle
# Not that of weights: from one model's steps nobody can tell it from the overhead.
RATES = ("gemm_flop_per_s", "prefill_attention_flop_per_s")


@dataclass(frozen=True)
class Batch:
    """Steps of one kind of batch, and the median of the GPU's time for them."""

    label: str
    attention: str
    prefill: bool
    lengths: list[int]  # of each row: prompt tokens to compute, or KV tokens
    cached: list[int]
    paths: list[tuple[int, ...]]
    block: int
    seconds: float

    def predicted(self, model: StepTimeModel) -> float:
        """Its time by a model."""
        if self.prefill:
            return model.prefill(self.lengths, self.cached)
        return model.decode(self.lengths, model.sharing(self.paths, self.block, self.lengths))


def batches(steps: Sequence[Steps]) -> list[Batch]:
    """Decode batches of the steady loads, and prefill steps of single requests."""
    found = []
    prefilled = {id(one) for one in alike(steps)}
    for one in steps:
        table = one.table
        gpu, waited = gpu_seconds(table), table["ready"] - table["begin_result"]
        attention = one.setting.attention
        case = parse_case(one.load)
        if case.steady:
            mask = ~table["prefill"] & (table["rows"] == case.batch) & (waited > LEAST_WAIT)
            if mask.sum() >= 5:
                length = round(float(table["kv_tokens"][mask].mean()) / case.batch)
                paths = [request.hash_ids for request in case.trace.requests]
                label = f"decode {one.load}, {attention}"
                seconds = float(np.median(gpu[mask]))
                lengths = [length] * case.batch
                found.append(Batch(label, attention, False, lengths, [], paths, case.trace.block_size, seconds))
        if id(one) not in prefilled:
            continue
        lone = table["prefill"] & (table["rows"] == 1) & (waited > GPU_BOUND_SECONDS)
        for new in np.unique(table["new_tokens"][lone]):
            mask = lone & (table["new_tokens"] == new)
            for cached in np.unique(table["cached_tokens"][mask]):
                same = mask & (table["cached_tokens"] == cached)
                label = f"prefill {new:.0f} tokens after {cached:.0f}, {attention}"
                seconds = float(np.median(gpu[same]))
                found.append(Batch(label, attention, True, [int(new)], [int(cached)], [], 1, seconds))
    return found


def slower(kernel: AttentionTime, factor: float) -> AttentionTime:
    """A kernel that takes `factor` times as long for everything."""
    changed = {}
    for spec in fields(kernel):  # type: ignore[arg-type]
        value = getattr(kernel, spec.name)
        if spec.name.endswith("_bytes_per_s"):
            changed[spec.name] = value / factor
        elif spec.name.endswith("_s"):
            changed[spec.name] = value * factor
    return replace(kernel, **changed)  # type: ignore[type-var]


def fit_memory(base: HardwareProfile, shape: ModelShape, recording: Recording) -> HardwareProfile:
    """Return the base profile with this GPU's memory, and the share of it that SGLang gave to weights and KV cache."""
    memory = float(recording.content["machine"]["memory_mib"]) * 2**20
    tokens = min(server["kv_tokens"] for server in recording.content["servers"])
    used = tokens * shape.kv_bytes_per_token + shape.stored_bytes
    return replace(base, memory_bytes=memory, memory_share=used / memory)


def fit_gpu(
    base: HardwareProfile, shape: ModelShape, found: Sequence[Batch]
) -> tuple[HardwareProfile, list[dict[str, Any]]]:
    """Return the base profile with its rates, its overhead and its kernels scaled, and each batch's two times."""
    kernels = sorted({batch.attention for batch in found if not batch.prefill})
    names = [*RATES, "step_overhead_s", *kernels]

    def scaled(factors: np.ndarray) -> HardwareProfile:
        by_name = dict(zip(names, factors.tolist(), strict=True))
        attention = {name: slower(one, by_name[name]) if name in by_name else one
                     for name, one in base.attention.items()}  # fmt: skip
        rates = {name: getattr(base, name) / by_name[name] for name in RATES}
        overhead = base.step_overhead_s * by_name["step_overhead_s"]
        return replace(base, attention=attention, step_overhead_s=overhead, **rates)

    def predictions(profile: HardwareProfile) -> np.ndarray:
        models = {name: StepTimeModel(profile, shape, name) for name in {batch.attention for batch in found}}
        return np.array([batch.predicted(models[batch.attention]) for batch in found])

    measured = np.array([batch.seconds for batch in found])

    def errors(factors: np.ndarray) -> np.ndarray:
        # Weakly tied to the base: what no load tells apart stays as it was.
        return np.concatenate([np.log(predictions(scaled(factors)) / measured), 0.05 * np.log(factors)])

    factors = least_squares(errors, np.ones(len(names)), bounds=(0.2, 5.0), loss="soft_l1", f_scale=0.05).x
    profile = scaled(factors)
    table = [
        {"batch": batch.label, "seconds": batch.seconds, "predicted": float(predicted)}
        for batch, predicted in zip(found, predictions(profile), strict=True)
    ]
    return profile, table
