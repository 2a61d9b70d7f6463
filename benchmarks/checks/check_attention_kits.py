"""Check whether the pat backend passes SGLang's own attention kits, which its wheel has in ``sglang.test.kits``.

    PYTHONPATH=.:kernels python benchmarks/checks/check_attention_kits.py
    PYTHONPATH=.:kernels python benchmarks/checks/check_attention_kits.py --head-dims 64,128,256
    PYTHONPATH=.:kernels python benchmarks/checks/check_attention_kits.py --device cpu

Two kits concern a backend that decodes: ``attention_methods/dense_attention.py`` runs one layer of attention and
compares it with attention from the definition (``dense``), and ``runner_modes/cuda_graph_decode_runner.py`` calls the
backend as SGLang does around a CUDA graph, capture with a dummy batch and replay of a smaller one with padding
(``graph``; it records no graph itself, which check_decode_kernel.py and check_pat_server.py do). Every decode case runs
with each page size that the kit has, in each dtype and head dimension, and in all layouts of slots. It also runs twice:
as the kit runs it, a batch that nobody announced, and announced to the backend, as a server's batches are. Their
requests share nothing. What the kits have for prefill, sliding windows and speculation is left out.

The backend comes from SGLang's registry, by the name ``pat``, after SGLang has loaded its plugins. ``--device cpu``
runs the same cases without a GPU, with the NumPy reference in the kernel's place. On a GPU the first case of each dtype
and head dimension takes long where the kernels are not built yet. Exit status: 0 if everything is right, 1 if something
is wrong, 3 if nothing is wrong but something could not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from feather_sglang.adapter import cpu_shims
from feather_sglang.errors import FeatherError

KIT = "sglang.test.kits.attention_unittest"
DENSE, GRAPH = f"{KIT}.attention_methods.dense_attention", f"{KIT}.runner_modes.cuda_graph_decode_runner"
UNNEEDED = f"{KIT}.attention_methods.dual_chunk_attention"
PAT, PREFILL = "pat", "torch_native"
HIDDEN_SIZE = 256  # as in SGLang's own tests of backends that need a head dimension of 64
LAYOUTS = ("shuffled_pages", "interleaved_pages", "contiguous")
KINDS = ("dense", "graph")
OTHER_KITS = {
    "kits of mla, dsa, dsv4 and dual_chunk": "other kinds of attention, which pat refuses",
    "kits of gdn, kda, lightning and mamba2": "no softmax attention",
    "runner modes speculative_*": "speculative decoding, which pat refuses",
    "runner mode split_op": "prefill, which pat leaves to another backend",
}


@dataclass
class Counts:
    """Cases by verdict, and how many were right of each kind."""

    right: dict[str, int]
    wrong: int = 0
    not_run: int = 0
    left_out: int = 0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--head-dims", default="64,128", help="of the kernel's, with commas (default: %(default)s)")
    parser.add_argument("--dtypes", default="float16,bfloat16", help="with commas (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print the traceback of what is wrong")
    options = parser.parse_args(argv)
    try:
        options.head_dims = [int(text) for text in options.head_dims.split(",")]
        options.dtypes = [{"float16": torch.float16, "bfloat16": torch.bfloat16}[n] for n in options.dtypes.split(",")]
    except (ValueError, KeyError) as error:
        parser.error(f"--head-dims takes numbers, --dtypes takes float16 and bfloat16: {error}")
    return options


# The kits -------------------------------------------------------------------------------------------------------


def load_kits(device: str) -> tuple[ModuleType, ModuleType]:
    """Both kits, once SGLang has loaded its plugins.

    Raises
    ------
    FeatherError
        SGLang does not have them, or does not know the backend.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if PAT not in ATTENTION_BACKENDS:
        raise FeatherError(
            "SGLang knows no backend pat: feather-sglang is not installed here (pip install --no-deps .)"
        )
    try:
        dense = importlib.import_module(DENSE)
        # Some releases' graph kit imports the dual-chunk kit, which needs SGLang's GPU kernels, even on a CPU.
        if device == "cpu" and importlib.util.find_spec("sgl_kernel") is None:
            sys.modules.setdefault(UNNEEDED, mock.MagicMock())
        return dense, importlib.import_module(GRAPH)
    except ImportError as error:
        raise FeatherError(f"this SGLang does not have the kits, or they need more: {error}") from None


@contextmanager
def fit_for_pat(dense: ModuleType, graph: ModuleType) -> Iterator[Callable[[bool], None]]:
    """Everything that the kits' stand-ins lack and the backend reads.

    Yields
    ------
    callable
        Says whether batches are announced from now on.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import get_parallel

    class Runner(dense.MockModelRunner):  # type: ignore[name-defined, misc]
        def __init__(self, *, case: Any, model_config: Any, head_dim: int, **others: Any) -> None:
            # pat decodes beside another backend, which --attention-backend names. The kit has one name for both: in
            # the registry it looks for the case's, and this one goes into the server's arguments.
            case = replace(case, backend=PREFILL)
            super().__init__(case=case, model_config=model_config, head_dim=head_dim, **others)
            self.decode_attention_backend_str = PAT
            # The kit's model has no layers. The backend wants to see those that it will serve.
            layer = RadixAttention(
                num_heads=case.num_heads, head_dim=head_dim, scaling=head_dim**-0.5, num_kv_heads=case.num_kv_heads,
                layer_id=0,
            )  # fmt: skip
            self.model = torch.nn.ModuleList([layer])
            self.model_config.has_attention_sinks = False

    announced = False
    original = dense._make_forward_batch

    def make_forward_batch(case: Any, runner: Any, **options: Any) -> Any:
        batch = original(case, runner, **options)
        if announced:  # as `ForwardBatch.init_new` does, which the kits leave out
            reqs = [f"r{row}" for row in range(case.batch_size)]
            rows = batch.req_pool_indices.cpu().long()
            runner.feather_pat.expect(SimpleNamespace(reqs=reqs, req_pool_indices_cpu=rows))
        return batch

    def announce(value: bool) -> None:
        nonlocal announced
        announced = value

    # The kit says this of tensor parallelism alone; without a process group some releases know no sizes of the others.
    single = get_parallel().override(attn_dp_size=1, attn_cp_size=1, attn_dcp_size=1)
    with (
        mock.patch.object(dense, "MockModelRunner", Runner),
        mock.patch.object(dense, "_make_forward_batch", make_forward_batch),
        mock.patch.object(graph, "_make_dense_forward_batch", make_forward_batch),
        single,
    ):
        yield announce


def all_cases(dense: ModuleType) -> list[Any]:
    """The kit's cases, those of SGLang's own tests that it lacks, and all decode cases with every page size."""
    cases = [*dense.make_dense_cases(PAT)]
    mha = next(case for case in cases if case.forward_mode.is_decode())
    cases += [  # of SGLang's tests of backends that only decode
        replace(mha, name="mqa_decode_bsz1", num_kv_heads=1, prefix_lens=(7,)),
        replace(mha, name="mha_decode_page32_boundary", page_size=32, prefix_lens=(31, 32)),
    ]
    sizes = sorted({case.page_size for case in cases})
    paged = [
        replace(case, page_size=size)
        for case in cases
        for size in (sizes if case.forward_mode.is_decode() else [case.page_size])
    ]
    windows = (dense.make_swa_no_prefix_input_config_cases, dense.make_swa_prefix_input_config_cases)
    return paged + [case for make in windows for case in make(PAT)]


def unsupported(case: Any) -> str:
    """Why a case is left out; empty if it is not."""
    if case.sliding_window_size is not None:
        return "sliding window, which pat refuses"
    if not case.forward_mode.is_decode():
        return "prefill, which pat leaves to another backend"
    return ""


# Running --------------------------------------------------------------------------------------------------------


def settings_of(kind: str, options: argparse.Namespace) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Each setting of a case: its name, whether batches are announced, and the arguments for the kit."""
    layouts = LAYOUTS if kind == "dense" else (None,)  # the graph kit has no argument for it
    for dtype, head_dim, announced, layout in itertools.product(
        options.dtypes, options.head_dims, (False, True), layouts
    ):
        chosen = {"head_dim": head_dim, "hidden_size": HIDDEN_SIZE, "dtype": dtype, "device": options.device}
        name = [str(dtype).removeprefix("torch."), f"head_dim {head_dim}"]
        if layout:
            chosen["loc_layout"] = layout
            name.append(layout)
        yield ", ".join([*name, "announced" if announced else "unannounced"]), announced, chosen


def first_line(error: BaseException) -> str:
    """What an error says, in one line; the kits' comparisons say how many elements differ, and by how much."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("Mismatched", "Greatest absolute"))] or lines[:1]
    return f"{type(error).__name__}: {'; '.join(said)}"[:300]


def run_case(
    kind: str, case: Any, run: Callable[..., None], announce: Callable[[bool], None], options: argparse.Namespace
) -> tuple[str, str]:
    """One case in all settings, up to the first that fails: a verdict and what goes with it."""
    done = 0
    for name, announced, chosen in settings_of(kind, options):
        announce(announced)
        try:
            with torch.no_grad():  # the kit fills the KV cache outside of it, which a CPU's caches refuse
                run(unittest.TestCase(), case, **chosen)
            if options.device == "cuda":
                torch.cuda.synchronize()
        except (unittest.SkipTest, FeatherError) as error:
            return "not run", f"{name}: {error}"
        except Exception as error:
            if options.verbose:
                traceback.print_exc()
            return "wrong", f"{name}: {first_line(error)}"
        done += 1
    return "right", f"{done} settings"


def say(verdict: str, what: str, why: str) -> None:
    print(f"{verdict:9}{what}: {why}", flush=True)


def run_all(
    dense: ModuleType, graph: ModuleType, announce: Callable[[bool], None], options: argparse.Namespace
) -> Counts:
    """Run every case of both kinds, and print a line about each."""
    runs = {"dense": dense.run_dense_attention_case, "graph": graph.run_dense_cuda_graph_decode_case}
    counts = Counts(dict.fromkeys(KINDS, 0))
    for case, kind in itertools.product(all_cases(dense), KINDS):
        what = f"{kind}  {case.name}, page size {case.page_size}"
        if reason := unsupported(case):
            if kind == "dense":  # the other kit takes decode cases only
                counts.left_out += 1
                say("left out", what, reason)
            continue
        verdict, detail = run_case(kind, case, runs[kind], announce, options)
        counts.right[kind] += verdict == "right"
        counts.wrong += verdict == "wrong"
        counts.not_run += verdict == "not run"
        say(verdict, what, detail)
    say("left out", f"head_dim {dense.DEFAULT_HEAD_DIM}, the kits' own", "the kernel has 64, 128 and 256")
    for kit, reason in OTHER_KITS.items():
        say("left out", kit, reason)
    return counts


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.device == "cpu":
        os.environ["FEATHER_PAT_REFERENCE"] = "1"
        cpu_shims.install()
    elif not torch.cuda.is_available():
        print("could not run: no CUDA device (--device cpu runs the NumPy reference)", file=sys.stderr)
        return 3
    os.environ["FEATHER_DEBUG_CHECK"] = "1"  # what the backend takes for shared is compared, at every step
    try:
        dense, graph = load_kits(options.device)
    except FeatherError as error:
        print(f"could not run: {error}", file=sys.stderr)
        return 3
    with fit_for_pat(dense, graph) as announce:
        counts = run_all(dense, graph, announce, options)
    right = ", ".join(f"{count} {kind}" for kind, count in counts.right.items())
    print(
        f"SGLang {metadata.version('sglang')} on {options.device}: {right} cases right, {counts.wrong} wrong, "
        f"{counts.not_run} could not run, {counts.left_out} left out"
    )
    if counts.wrong:
        return 1
    return 3 if counts.not_run or not all(counts.right.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
