"""``--server-flags`` of a replay on the installed SGLang: its parser reads them, its scheduler does what they say."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from effort import newest_is_enough
from feather_sglang.adapter import server_flags as adapter
from feather_sglang.adapter.hooks import installed_version
from feather_sglang.adapter.replay_engine import delay_prefill_by
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.replay import jobs as replays
from feather_sglang.replay import processes, server_flags
from feather_sglang.replay.flag_table import HANDED, OWN, PREFILL_GRAPHS_OFF, REFUSED, WITHOUT_EFFECT, Group
from feather_sglang.replay.model_shape import load_model
from feather_sglang.replay.profiles import load_profile
from feather_sglang.replay.step_time import StepTimeModel
from feather_sglang.replay.traces import Trace, TraceRequest

OUTPUT = 60
# Prompts of their own lengths that share nothing, so that a row tells whose it is.
BURST = Trace("burst", 1000, [TraceRequest(n, 0.001 * n, 200 + n, OUTPUT, (n,)) for n in range(30)])


def read(text):
    """What SGLang's parser makes of it, in a process of its own."""
    return server_flags._read(text.split())


def released_with(name):
    from sglang.srt.server_args import ServerArgs

    return pytest.mark.skipif(
        name not in ServerArgs.__annotations__, reason=f"sglang {installed_version()} has no {name}"
    )


def test_sglangs_own_types_and_defaults_are_read():
    assert read("--tp 1 --port 30000 --page-size 1") == {"page_size": 1}
    # A replay's own default is another than SGLang's.
    assert read("--stream-interval 1") == {"stream_interval": 1}
    given = read("--max-total-tokens 300000 --schedule-conserv 0.5 --enable-mixed-chunk --dp=2 --feather-gather off")
    assert given == {
        "max_total_tokens": 300_000,
        "schedule_conservativeness": 0.5,
        "enable_mixed_chunk": True,
        "dp_size": 2,
        "feather_gather": False,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--no-such-flag 3", f"sglang {installed_version()} does not know --no-such-flag"),
        ("--help", f"sglang {installed_version()} does not know --help"),
        ("--max-running-requests many", "invalid int value: 'many'"),
        ("--retraction-policy none", "invalid choice: 'none'"),
        ("--feather-gather perhaps", "expected on or off"),
    ],
)
def test_what_sglang_does_not_take_is_one_line(text, says):
    with pytest.raises(FeatherError) as error:
        read(text)
    assert says in str(error.value) and "--server-flags" in str(error.value) and "\n" not in str(error.value)


def test_every_flag_of_this_sglang_has_a_place(monkeypatch):
    """A new one is looked at before a replay says that it has no effect."""
    parsers = []
    monkeypatch.setattr(adapter, "_Parser", lambda kind=adapter._Parser: parsers.append(kind()) or parsers[-1])
    adapter.read_flags(["--host=h"])
    names = {action.dest for action in parsers[0]._actions}
    own = {*OWN, *PREFILL_GRAPHS_OFF, *(name for name in names if name.startswith("feather_"))}
    groups = (*HANDED, *REFUSED, Group("without effect", WITHOUT_EFFECT))
    assert [name for name in sorted(names - own) if not server_flags._group(groups, name)] == []
    assert len(names) > 400


class Steps(StepTimeModel):
    """Notes each step: the rows of a prefill step (new tokens, earlier tokens, request), None for a decode step."""

    def __init__(self):
        super().__init__(load_profile("h200"), load_model("qwen3-8b"), "fa3")
        self.steps = []

    def prefill(self, extend_lens, prefix_lens, paths=None, block_size=1):
        if paths is not None and paths[0]:
            self.steps.append(
                [(new, before, path[0]) for new, before, path in zip(extend_lens, prefix_lens, paths, strict=True)]
            )
        return super().prefill(extend_lens, prefix_lens, paths, block_size)

    def decode(self, seq_lens, sharing):
        if len(seq_lens) and max(seq_lens) > 100:  # not the warm-up request that a policy is told of
            self.steps.append(None)
        return super().decode(seq_lens, sharing)


def noted(job, tell):
    os.environ["FEATHER_OPTIONS"] = json.dumps(job.options)
    from feather_sglang.adapter.replay_engine import Replay, ReplaySettings

    with tempfile.TemporaryDirectory() as folder:
        engine = Replay(Path(folder), job.policy, job.trace, job.model, ReplaySettings(**job.settings))
        outcome = engine.run(job.trace)
    return job.model.steps, outcome.retractions, [len(one.gaps) for one in outcome.served]


def replayed(tmp_path, *flags, policy="fcfs", **settings):
    """The steps of the burst on a server with these flags, and its retractions."""
    settings = {"kv_tokens": 50_000, "scheduler_cost": "off", "server_flags": flags, **settings}
    job = replays.Job(policy, BURST, Steps(), settings, {})
    steps, retractions, gaps = processes.run_jobs([job], 1, tmp_path, Console(quiet=True), noted)[policy]
    assert gaps == [OUTPUT - 1] * len(BURST.requests)
    return steps, retractions


def decodes_between(steps):
    """Decode steps between each prefill step and the next."""
    prefills = [number for number, step in enumerate(steps) if step is not None]
    return [later - earlier - 1 for earlier, later in pairwise(prefills)]


@released_with("prefill_decode_interval")
@pytest.mark.parametrize("policy", ["fcfs", "feather"])
def test_decode_steps_lie_between_prefill_steps(tmp_path, policy):
    usual, _ = replayed(tmp_path, policy=policy, chunked_prefill=256)
    spaced, _ = replayed(tmp_path, "--prefill-decode-interval=4", policy=policy, chunked_prefill=256)
    assert min(decodes_between(usual)) < 4 <= min(decodes_between(spaced))


@newest_is_enough
def test_a_prefill_step_takes_as_many_requests_as_the_server_says(tmp_path):
    usual, _ = replayed(tmp_path, chunked_prefill=2048)
    few, _ = replayed(tmp_path, "--prefill-max-requests=2", chunked_prefill=2048)
    most = [max(len(step) for step in steps if step is not None) for steps in (usual, few)]
    assert most[0] > 2 == most[1]


def test_in_mixed_chunks_running_requests_go_on_beside_a_prompt(tmp_path):
    steps, _ = replayed(tmp_path, "--enable-mixed-chunk", chunked_prefill=128)
    ends = {request.hash_ids[0]: request.input_length for request in BURST.requests}  # of the tokens that are known
    mixed = 0
    for step in steps:
        if step is None:
            continue
        assert sum(new for new, _, _ in step) <= 128
        going_on = [(new, before, whose) for new, before, whose in step if before >= BURST.requests[whose].input_length]
        mixed += bool(going_on) and len(going_on) < len(step)
        for new, before, whose in going_on:  # one token each, after all that the request had by then
            assert new == 1 and ends[whose] <= before < BURST.requests[whose].input_length + OUTPUT
            ends[whose] = before + 1
    assert mixed > 10
    plain, _ = replayed(tmp_path, chunked_prefill=128)
    assert all(before < BURST.requests[whose].input_length for step in plain if step for _, before, whose in step)


@newest_is_enough
def test_a_conservative_server_retracts_nobody_and_runs_fewer_at_a_time(tmp_path):
    """In a pool with room for half of the requests, whose answers are estimated."""
    (bold, retracted), (careful, none) = (
        replayed(tmp_path, f"--schedule-conservativeness={much}", kv_tokens=4000) for much in ("0.1", "3")
    )
    assert retracted > none == 0 and bold.count(None) < 0.9 * careful.count(None)


def test_the_prefill_delayer_waits_by_the_virtual_clock(tmp_path):
    from sglang.srt.managers import prefill_delayer

    now = [100.0]
    before = prefill_delayer._State, prefill_delayer.time
    delay_prefill_by(lambda: now[0])
    try:
        state = prefill_delayer._State()
        now[0] = 107.0
        assert prefill_delayer.time.perf_counter() - state.bump_delayed_count().start_time == 7.0
    finally:
        prefill_delayer._State, prefill_delayer.time = before


def test_flags_that_sglang_refuses_together_are_one_line(tmp_path):
    for policy, flags, says in (
        ("fcfs", ("--retraction-policy=priority",), "requires --enable-priority-scheduling"),
        ("feather", ("--disable-radix-cache",), "does not support --disable-radix-cache"),
    ):
        with pytest.raises(FeatherError) as error:
            replayed(tmp_path, *flags, policy=policy)
        assert says in str(error.value) and flags[0] in str(error.value) and "\n" not in str(error.value)


def test_ab_replays_the_users_server(tmp_path, capsys):
    small = [
        "--requests",
        "40",
        "--rate",
        "50",
        "--prefix-tokens",
        "400",
        "--output-tokens",
        "12",
        "--policies",
        "fcfs",
    ]
    line = "--tp 1 --host 0.0.0.0 --max-total-tokens 6000 --chunked-prefill-size 256 --prefill-max-requests 1"
    assert main(["ab", *small, "--server-flags", line, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    settings = results["settings"]
    assert settings["server_flags"] == ["--prefill-max-requests=1"]
    assert (settings["kv_tokens"], settings["chunked_prefill"]) == (6000, 256)
    assert results["runs"]["fcfs"]["prefills"] >= 40
    said = capsys.readouterr().out
    assert "--host" in said and "--tp" not in said.replace("--tp 1", "")
    assert main(["ab", *small, "--server-flags=--tp 2", "--out", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert "--tp-size=2" in error and error.count("\n") == 1 and not (tmp_path / "no").exists()
