"""Let the published SGLang wheels import and run beside a CPU build of torch.

Two things stand in the way without a GPU. The torchvision wheels link CUDA: their extension does not load, so the
operators that ``torchvision/__init__.py`` refers to at import are missing. And SGLang's rotary embedding imports a
kernel from ``vllm._custom_ops`` on every device it does not know; on a CPU it then never calls it.

`install` puts one finder in front of Python's import system; nothing heavy is imported until torchvision or vllm is,
and then the finder steps in only if the real thing is not usable. Where torch finds a GPU it does nothing.

Both imports happen inside ``import sglang`` itself (seen on 0.5.17 to 0.5.23), hence before SGLang loads any
plugin: calling `install` from a plugin is too late for ``python -m sglang.launch_server``. A program of ours calls it
before it imports sglang; for SGLang's own commands, and for the processes that they spawn, an environment without a
GPU is prepared once with ``python -m feather_sglang.adapter.cpu_shims``, which writes a one-line ``.pth`` file into
that environment. No package of ours ships that file, so an environment with a GPU never has it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path

PTH_NAME = "feather_sglang_cpu.pth"
PTH_LINE = (
    "import importlib.util; importlib.util.find_spec('feather_sglang') and "
    "__import__('feather_sglang.adapter.cpu_shims', fromlist=['install']).install()\n"
)

_NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_TORCHVISION_OPERATORS = ("nms", "qnms")


class _CpuFinder(importlib.abc.MetaPathFinder):
    """Prepares torchvision's operators, and stands in for a vllm that is not installed."""

    def __init__(self) -> None:
        self.libraries: list[object] = []  # torch drops the operators with the Library object that defined them

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and not self.libraries and _no_gpu():
            self._define_torchvision_operators()
        elif name in ("vllm", "vllm._custom_ops") and _no_gpu() and PathFinder.find_spec("vllm") is None:
            return ModuleSpec(name, _VllmStub(), is_package=name == "vllm")
        return None

    def _define_torchvision_operators(self) -> None:
        spec = PathFinder.find_spec("torchvision")
        if spec is None or spec.origin is None or _extension_loads(Path(spec.origin).parent):
            return
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _TORCHVISION_OPERATORS:
            if not hasattr(torch.ops.torchvision, operator):
                library.define(operator + _NMS_SCHEMA)
        self.libraries.append(library)


class _VllmStub(importlib.abc.Loader):
    """Loader of an empty ``vllm`` package whose ``_custom_ops`` has the one name that SGLang imports."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm._custom_ops":
            module.rotary_embedding = _rotary_embedding  # type: ignore[attr-defined]


def _rotary_embedding(*args: object, **kwargs: object) -> None:
    raise RuntimeError("vllm is not installed: SGLang was expected to use its native rotary embedding on a CPU")


def _no_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return not torch.cuda.is_available()


def _extension_loads(package: Path) -> bool:
    """Whether torchvision's own operators can be had, by loading them just as torchvision would."""
    import torch

    for suffix in EXTENSION_SUFFIXES:
        library = package / f"_C{suffix}"
        if library.exists():
            try:
                torch.ops.load_library(str(library))
            except OSError:
                return False
            return True
    return False


def install() -> None:
    """Make ``import sglang`` work in this process without a GPU; call it before sglang is imported.

    Safe to call again, and with a GPU, where it changes nothing.
    """
    if not any(isinstance(finder, _CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CpuFinder())


def prepare_environment() -> Path:
    """Write the ``.pth`` file that calls `install` whenever this environment's Python starts; deleting it undoes it."""
    target = Path(sysconfig.get_path("purelib")) / PTH_NAME
    target.write_text(PTH_LINE)
    return target


if __name__ == "__main__":
    print(f"SGLang can now start without a GPU in this environment: wrote {prepare_environment()}")
