"""Hardware profiles: rates of a GPU and prices of a host, each beside its source, as JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard

from feather_sglang.errors import FeatherError, quoted
from feather_sglang.replay.attention_time import KINDS, AttentionTime
from feather_sglang.replay.model_shape import ModelShape
from feather_sglang.simulation.host_time import HostTime

FORMAT = "feather-profile"
VERSION = 1

_NOT_NUMBERS = ("name", "title", "attention", "host", "sources")
_MAY_BE_ZERO = {
    "step_overhead_s",
    "elementwise_vectors",
    "prefill_tile_keys",
    "launch_s",
    "item_s",
    "split_rows",
    "longest_share",
}
# What is beyond these is no machine, and steps that it took no time or forever.
_SMALLEST, _LARGEST = 1e-18, 1e21
_AT_MOST = {"memory_bytes": 1e13, "memory_share": 1.0, "products_overlap": 32.0, "overlap": 32.0}


@dataclass(frozen=True)
class HardwareProfile:
    """A GPU as the step-time model sees it.

    Attributes
    ----------
    memory_bytes, memory_share : device memory, and the share of it for weights and KV cache.
    copy_bytes_per_s : what a copy gets, reading and writing counted.
    weight_bytes_per_s, gemm_flop_per_s : what matrix products of few and of many rows get.
    products_overlap : exponent p of (weights^p + flop^p)^(1/p), the time of products in between.
    prefill_attention_flop_per_s, prefill_tile_rows : rate of prefill attention, in whole tiles of query rows;
    prefill_tile_keys : a tile takes as long to set up as this many keys.
    elementwise_vectors : hidden vectors that a token moves per layer outside products and attention.
    step_overhead_s : per step, whatever the batch.
    host : processor times of the machine around it; None: not known, the profile has no "host".
    attention : decode attention kernels by name; the first is the default.
    sources : parameter -> where its value is from.
    """

    name: str
    title: str
    memory_bytes: float
    memory_share: float
    copy_bytes_per_s: float
    weight_bytes_per_s: float
    gemm_flop_per_s: float
    products_overlap: float
    prefill_attention_flop_per_s: float
    prefill_tile_rows: float
    prefill_tile_keys: float
    elementwise_vectors: float
    step_overhead_s: float
    attention: dict[str, AttentionTime]
    sources: dict[str, str]
    host: HostTime | None = None

    def known_host(self) -> HostTime:
        """Return the host times; ``FeatherError`` where the profile has none."""
        if self.host is None:
            raise FeatherError(
                f"profile {self.name} has no host times: give --scheduler-cost off, or make one with feather calibrate"
            )
        return self.host

    def kv_tokens(self, model: ModelShape) -> int:
        """Return how many tokens of KV cache fit beside the weights, in whole thousands."""
        free = self.memory_bytes * self.memory_share - model.stored_bytes
        tokens = int(free / model.kv_bytes_per_token) // 1000 * 1000
        if tokens < 1000:
            raise FeatherError(f"{model.name} does not fit the memory of {self.name}: choose a smaller model")
        return tokens


def list_profiles() -> list[str]:
    """Return the names of the built-in profiles."""
    return sorted(entry.name[:-5] for entry in _folder().iterdir() if entry.name.endswith(".json"))


def load_profile(name: str | os.PathLike[str]) -> HardwareProfile:
    """Read a built-in profile by name, or any profile by the path of its JSON file."""
    text = os.fspath(name)
    try:
        if text in list_profiles():
            content = _folder().joinpath(f"{text}.json").read_text(encoding="utf-8")
        elif text.endswith(".json"):
            content = Path(text).read_text(encoding="utf-8")
        else:
            raise FeatherError(
                f"unknown hardware profile {text!r}: choose from {', '.join(list_profiles())}, or give a .json file"
            )
        return _parse(json.loads(content))
    except OSError as error:
        raise FeatherError(f"cannot read hardware profile {text}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FeatherError(f"hardware profile {text}: {str(error).splitlines()[0]}") from error


def document_of(base: HardwareProfile, fitted: HardwareProfile, name: str, title: str, source: str) -> dict[str, Any]:
    """The JSON of a profile that was fitted; what differs from its base has that `source`, the rest the base's."""

    old_host = asdict(base.host) if base.host is not None else {}

    def entry(key: str, value: float, before: float | None) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": base.sources[key] if value == before else source}

    plain = [f.name for f in fields(HardwareProfile) if f.name not in _NOT_NUMBERS]
    kinds = {kind: key for key, kind in KINDS.items()}
    attention = {}
    for kernel, times in fitted.attention.items():
        before = base.attention[kernel]
        names = [f.name for f in fields(times)]  # type: ignore[arg-type]
        where = f"attention.{kernel}"
        entries = {n: entry(f"{where}.{n}", getattr(times, n), getattr(before, n)) for n in names}
        attention[kernel] = {"kind": kinds[type(times)], "parameters": entries}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "title": title,
        "parameters": {n: entry(f"parameters.{n}", getattr(fitted, n), getattr(base, n)) for n in plain},
        "attention": attention,
        "host": {n: entry(f"host.{n}", value, old_host.get(n)) for n, value in asdict(fitted.known_host()).items()},
    }


def _folder() -> Any:
    return resources.files("feather_sglang.replay") / "profiles"


def _parse(document: Any) -> HardwareProfile:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'not a hardware profile: it lacks "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise ValueError(f"version is {quoted(document.get('version'))}, this release reads {VERSION}")
    sources: dict[str, str] = {}
    plain = [f.name for f in fields(HardwareProfile) if f.name not in _NOT_NUMBERS]
    numbers = _numbers(document.get("parameters"), plain, "parameters", sources)
    kernels = document.get("attention")
    if not isinstance(kernels, dict) or not kernels:
        raise ValueError("attention: must be an object that names at least one kernel")
    attention = {}
    for kernel, entry in kernels.items():
        where = f"attention.{kernel}"
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"{where}.kind: must be one of {', '.join(KINDS)}, not {quoted(kind)}")
        names = [f.name for f in fields(KINDS[kind])]
        attention[kernel] = KINDS[kind](**_numbers(entry.get("parameters"), names, where, sources))
    host = None
    if "host" in document:
        names = [f.name for f in fields(HostTime)]
        host = HostTime(**_numbers(document["host"], names, "host", sources, may_be_zero=True))
    name, title = document.get("name"), document.get("title")
    if not _is_text(name) or not _is_text(title) or not all(map(_is_text, kernels)):
        raise ValueError("name and title must be strings, as names of kernels are, of one line each")
    return HardwareProfile(name=name, title=title, attention=attention, sources=sources, host=host, **numbers)


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether reports can print it, and files have it."""
    return isinstance(value, str) and value.isprintable()


def _numbers(
    entries: Any, names: list[str], where: str, sources: dict[str, str], may_be_zero: bool = False
) -> dict[str, float]:
    """Return the values called `names`, each {"value", "source"}, and enter their sources."""
    if not isinstance(entries, dict):
        raise ValueError(f"{where}: must be an object of parameters")
    unknown = sorted(set(entries) - set(names))
    if unknown:
        raise ValueError(f"{where}: no such parameter: {quoted(unknown[0])}; known are {', '.join(names)}")
    values = {}
    for name in names:
        key = f"{where}.{name}"
        entry = entries.get(name)
        if not isinstance(entry, dict):
            raise ValueError(f'{key}: missing, or not an object with "value" and "source"')
        value: Any = entry.get("value")
        source = entry.get("source")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
        zero = may_be_zero or name in _MAY_BE_ZERO
        if not number or value < 0 or (value == 0 and not zero):
            least = "at least 0" if zero else "more than 0"
            raise ValueError(f"{key}.value: must be a finite number of {least}, not {quoted(value)}")
        most = _AT_MOST.get(name, _LARGEST)
        least_number = 0.1 if "overlap" in name else _SMALLEST
        if value > most or 0 < value < least_number:
            raise ValueError(f"{key}.value: must be from {least_number:g} to {most:g}, not {quoted(value)}")
        if not _is_text(source) or not source.strip():
            raise ValueError(f"{key}.source: must say where the value is from")
        values[name] = value
        sources[key] = source
    return values
