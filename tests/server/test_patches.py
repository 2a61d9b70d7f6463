"""A copy of the installed SGLang with the series of ``patches/``: extension points do the work of the hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from feather_sglang.cli import main
from feather_sglang.patching.series import PREFIX, Series
from feather_sglang.patching.site import Site
from feather_sglang.scheduling.policy_names import SWITCH_PATH
from preloaded import Preloaded
from server.cases import KEY, ROOMY
from server.sglang_server import SGLangServer, server_environment
from server.workload import Answer, Request, stream_all

sys.path.insert(0, str(Path(__file__).parent.parent / "behaviour"))

from record import REFERENCE, decisions, decisions_of

RELEASE = metadata.version("sglang")
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("prepared")]


def link_tree(source: Path, target: Path) -> None:
    """Copy a folder by hard links."""
    for folder, _, names in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True)
        for name in names:
            os.link(Path(folder, name), place / name)


def times_and_contents(root: Path) -> dict[str, tuple[int, int]]:
    """Of all but what Python compiles: a file that was written anew has another time or another content."""
    return {
        str(path): (path.stat().st_mtime_ns, hash(path.read_bytes()))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a patched copy, for PYTHONPATH."""
    installed = Site.find()
    # Hard links need one file system, and the temporary folder may be on another.
    root = tmp_path_factory.mktemp("patched")
    info = f"sglang-{installed.release}.dist-info"
    try:
        for name in ("sglang", info):
            link_tree(installed.root / name, root / name)
    except OSError:
        pytest.skip("needs the temporary folder on the file system of the environment")
    before = times_and_contents(root)
    for action in ("apply", "revert"):
        assert main(["patch", action, "--site", str(root)]) == 0
    assert times_and_contents(root) == before
    assert main(["patch", "apply", "--site", str(root)]) == 0
    return root


@pytest.fixture(scope="module")
def on_patched(patched: Path) -> Iterator[Preloaded]:
    """A Python that has imported the copy, for the processes of all tests."""
    path = os.pathsep.join([str(patched), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = Preloaded.start(server_environment(PYTHONPATH=path))
    assert made.run("import sglang; print(sglang.__file__)", os.environ)[0] == f"{patched}/sglang/__init__.py\n"
    yield made
    made.close()


IN_PROCESS = """
import json, tempfile
from pathlib import Path
from feather_sglang.adapter import cpu_shims
cpu_shims.install()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from feather_sglang.adapter.doctor import examine
from feather_sglang.adapter.inprocess import build_scheduler
from feather_sglang.errors import FeatherError
with tempfile.TemporaryDirectory() as folder:
    scheduler = build_scheduler(Path(folder), "feather", 512, max_total_tokens=4096)
policy = scheduler.policy
own = [(type(owner), *pair) for owner in (scheduler, policy) for pair in vars(owner).items()]
flags = {"schedule_policy": "feather", "disable_radix_cache": True}
args = ServerArgs(model_path="dummy", served_model_name="m", device="cpu", chunked_prefill_size=-1, **flags)
try:
    refused = args.check_server_args()
except FeatherError as error:
    refused = str(error)
print(json.dumps({
    "policy": type(policy).__name__,
    "failed": scheduler.feather.failed,
    "wrapped": [name for kind, name, value in own if callable(value) and hasattr(kind, name)],
    "hooked": sorted(HookRegistry._patched),
    "refused": refused,
    "doctor": examine(),
}))
"""


def test_nothing_is_wrapped_for_the_policies_and_the_doctor_says_so(on_patched: Preloaded) -> None:
    printed, errors = on_patched.run(IN_PROCESS, server_environment())
    assert printed, errors
    found = json.loads(printed.splitlines()[-1])
    assert found["policy"] == "FeatherPolicy" and not found["failed"] and found["wrapped"] == []
    assert {target.rpartition(".")[2] for target in found["hooked"]} <= {"__post_init__", "resolve_once"}  # of pat
    assert "does not support --disable-radix-cache" in found["refused"]
    doctor = found["doctor"]
    assert doctor["healthy"] and doctor["extension_points"] == 1 and "by extension points" in doctor["policies"]
    used = [hook for hook in doctor["hooks"] if hook["needed"] and "policies" in hook["features"]]
    assert {hook["kind"] for hook in used} == {"calls", "switch"}


@pytest.mark.parametrize(
    ("workload", "policy"),
    [("priorities", "feather-bandit"), ("levels", "feather-order"), ("bounded", "feather-bandit")],
)
def test_decisions_are_those_of_the_hooks(
    workload: str, policy: str, preloaded: Preloaded, on_patched: Preloaded
) -> None:
    hooked = json.loads(REFERENCE.read_text()).get(decisions_of(workload, policy))  # if it is recorded
    called = decisions(workload, policy, run=on_patched.run_file)
    assert called == (hooked or decisions(workload, policy, run=preloaded.run_file))


def test_the_series_is_for_git_am_and_brings_tests_that_pass(on_patched: Preloaded, tmp_path: Path) -> None:
    series, installed = Series(RELEASE), Site.find()
    made = series.apply(installed.read)
    for name in made:
        place = tmp_path / PREFIX / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (installed.root / name).exists():
            place.write_bytes(installed.read(name))
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    commands = [["init", "-q"], ["add", "-A"], ["commit", "-qm", "as released"], ["am", "-q", *map(str, series.files)]]
    for command in commands:
        subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True)
    assert {name: (tmp_path / PREFIX / name).read_bytes() for name in made} == made
    (test,) = (tmp_path / "test").rglob("test_*.py")
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "datasets.py").write_text("load_dataset = None\n")  # SGLang's test kit imports it
    arguments = ["-q", "-p", "no:cacheprovider", str(test)]
    code = f"import pytest; print('ended with', int(pytest.main({arguments!r})))"
    # The kit reads the first character of the devices' list.
    printed, errors = on_patched.run(
        code, server_environment(PYTHONPATH=str(tmp_path / "stand-in"), CUDA_VISIBLE_DEVICES="0")
    )
    assert printed.endswith("ended with 0\n") and " passed" in printed, printed + errors


def texts(answers: dict[str, Answer], chosen: list[Request]) -> dict[str, str]:
    return {request.name: answers[request.name].text for request in chosen}


def test_a_server_serves_and_switches_as_with_hooks(
    on_patched: Preloaded, model: Path, logs: Path, fcfs: list[dict[str, Answer]], requests: list[Request]
) -> None:
    flags = ("--schedule-policy", "feather", "--feather-allow-switch", "--admin-api-key", KEY, *ROOMY)
    chosen = [request for request in requests if "regex" not in request.body][:20]
    expected = texts(fcfs[0], chosen)
    how = {"start": on_patched, "key": KEY}
    with SGLangServer(model, logs / "patched.txt", *flags, **how, FEATHER_DEBUG_CHECK="1") as server:
        assert texts(stream_all(server.url, chosen), chosen) == expected
        for order in (
            {"schedule_policy": "lpm"},
            {"schedule_policy": "feather-heuristic", "options": {"max_wait": 3}},
        ):
            server.wait_until_idle()
            server.post(SWITCH_PATH, order)
            assert texts(stream_all(server.url, chosen), chosen) == expected
        (found,) = server.get("/server_info")["internal_states"]
        state = found["feather"]
        assert state["schedule_policy"] == "feather-heuristic" and not state["failed"] and state["rounds"] > 0
        assert "Traceback" not in server.text()
