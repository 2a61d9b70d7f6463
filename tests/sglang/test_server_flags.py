"""The flags that our benchmarks and checks give to servers, read by SGLang's own parser: names change with releases."""

import argparse
import shlex
import sys
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from feather_sglang.adapter.options import VARIABLE, add_flags
from feather_sglang.compare.server.config import BACKENDS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checks"))

import check_pat_server
import check_ranks
import gpu_parts
from server_names import COMMON_FLAGS

FLAGS = {
    "bench_server": COMMON_FLAGS,
    **{f"attention {name}": flags for name, flags in BACKENDS.items()},
    **{f"check_pat_server, {device}": flags for device, flags in check_pat_server.DEVICES.items()},
    "check_pat_server, all": check_pat_server.COMMON.format(running=8),
    **{f"variant {name}": variant.flags for name, variant in check_pat_server.VARIANTS.items()},
    "check_gpu, answers": gpu_parts.ANSWERS_FLAGS,
    **{f"check_ranks, {device}": flags for device, flags in check_ranks.DEVICES.items()},
}


@pytest.mark.parametrize("whose", FLAGS)
def test_sglang_knows_them(whose, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    ours, parser = (argparse.ArgumentParser(exit_on_error=False) for _ in range(2))
    add_flags(ours)
    ServerArgs.add_cli_args(parser)
    _, words = ours.parse_known_args(shlex.split(FLAGS[whose]))
    flags = [word.replace("feather", "fcfs").replace("pat", "triton") for word in words]
    parser.parse_args(["--model-path", "m", *flags])


def test_a_flag_that_sglang_has_dropped_is_noticed():
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser.parse_args(["--model-path", "m", "--no-such-flag", "1"])
