"""The pat backend in SGLang's own attention kits, with the NumPy reference in the kernel's place."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from effort import newest_is_enough

pytestmark = newest_is_enough

KIT = "sglang.test.kits.attention_unittest"
CHECK = Path(__file__).resolve().parents[2] / "benchmarks" / "checks" / "check_attention_kits.py"
# The kits change SGLang for the whole process, so this is one of its own. They run as is, and with a mistake.
CODE = """
import check_attention_kits as check
from feather_kernels.reference_engine import ReferenceEngine

arguments = ["--device", "cpu", "--head-dims", "64", "--dtypes", "float16"]
right = check.main(arguments)
run = ReferenceEngine.run
ReferenceEngine.run = lambda self, q, k, v, out: run(self, q, k, v.roll(1, 0), out)
print("status", right, check.main(arguments))
"""


def kit_found():
    try:
        return importlib.util.find_spec(KIT) is not None
    except ImportError:
        return False


@pytest.mark.skipif(not kit_found(), reason="this SGLang has no attention kits (sglang.test.kits)")
def test_the_kits_pass_and_notice_wrong_values(preloaded):
    paths = [str(CHECK.parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    shown, errors = preloaded.run(CODE, environment)
    summaries = [line for line in shown.splitlines() if line.startswith("SGLang ")]
    assert "status 0 1" in shown, shown[-3000:] + errors[-3000:]
    assert ", 0 wrong, 0 could not run" in summaries[0]
    assert ": 0 dense, 0 graph cases right" in summaries[1]
    assert "left out dense  swa_extend_prefix_window_edges, page size 16: sliding window" in shown
