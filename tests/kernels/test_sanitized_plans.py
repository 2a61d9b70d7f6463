"""Plans under the address and undefined-behaviour sanitizers: a few of those that ``dev.py sanitize`` makes."""

import subprocess
import sys

import pytest
import sanitized_plans

pytestmark = pytest.mark.slow  # the planner is compiled once more, which takes half a minute

WRAPS = """
from plan_checks import plan_of
from feather_kernels.options import PlannerOptions
from feather_kernels.trees import tree_forest
record = PlannerOptions.record
def with_a_share_that_is_refused(options):
    options._settle(alpha=(2.0**-57,) * 4)
    return record(options)
PlannerOptions.record = with_a_share_that_is_refused
plan_of(tree_forest((1, 8), (400, 100)))
"""


@pytest.fixture(scope="module")
def variables():
    found = sanitized_plans.environment()
    if found is None:
        pytest.skip("no g++ with libasan and libubsan")
    return found


def test_nothing_is_found_in_a_few_hundred_plans(variables):
    command = [sys.executable, sanitized_plans.__file__, "--plans", "300", "--checked", "80"]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "nothing found" in ran.stdout


def test_a_fault_is_found(variables):
    """Without the check of shares of a processor a product wraps to 0, and something is divided by it."""
    ran = subprocess.run([sys.executable, "-c", WRAPS], env=variables, capture_output=True, text=True)
    assert ran.returncode != 0 and "runtime error" in ran.stderr
