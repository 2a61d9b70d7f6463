"""Options: flags, the environment variable, and the errors for mistakes in either."""

import argparse
import json

import pytest

from feather_sglang.adapter.options import VARIABLE, FeatherOptions, add_flags, parse_flag, switch_allowed
from feather_sglang.errors import FeatherError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(argv)


def test_unset_and_empty_give_the_defaults():
    assert FeatherOptions.from_environment({}) == FeatherOptions() == FeatherOptions.from_environment({VARIABLE: " "})


def test_round_trip_through_the_environment():
    options = FeatherOptions(
        chunk_size=16, max_wait=2.5, seed=7, explore=False, row_order=False, gather=False, pace=0.1
    )
    environment: dict[str, str] = {}
    options.to_environment(environment)
    assert FeatherOptions.from_environment(environment) == options


def test_a_number_needs_a_value(capsys):
    with pytest.raises(SystemExit):
        parse("--feather-max-wait")
    assert "expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"chunksize": 3}', "unknown option 'chunksize'; the options are policy_file, chunk_size"),
        ('{"chunk_size": 0}', "chunk_size=0: expected a whole number of at least 1"),
        ('{"chunk_size": true}', "chunk_size=True"),
        ('{"chunk_size": 1.5}', "chunk_size=1.5"),
        ('{"max_wait": -1}', "max_wait=-1"),
        ('{"max_wait": 1' + "0" * 400 + "}", "expected seconds, 0 or more"),
        ('{"max_wait": NaN}', "max_wait=nan"),
        ('{"explore": "maybe"}', "explore='maybe': expected on or off"),
        ('{"gather": 1}', "gather=1: expected on or off"),
        ('{"pace": -0.1}', "pace=-0.1: expected seconds, 0 or more"),
        ('{"pace": true}', "pace=True: expected seconds, 0 or more"),
        ('{"pace": Infinity}', "pace=inf: expected seconds, 0 or more"),
        ('{"pace": "fast"}', "pace='fast'"),
        ('{"pace": "Auto"}', "pace='Auto'"),
        ('{"policy_file": "/no/such/file.json"}', "no such file"),
        ('{"record_plan": "/no/such/folder"}', "no such directory: create it first"),
        ('{"record_trace": "/no/such/folder"}', "no such directory: create it first"),
        ('{"record_trace_mb": 0.5}', "record_trace_mb=0.5: expected megabytes, at least 1"),
        ('{"record_trace_hours": 0}', "record_trace_hours=0: expected hours, more than 0"),
    ],
)
def test_a_mistake_in_the_variable_is_one_clear_line(text, says):
    with pytest.raises(FeatherError) as error:
        FeatherOptions.from_environment({VARIABLE: text})
    message = str(error.value)
    assert message.startswith(VARIABLE) and says in message and "\n" not in message


def test_flags_reach_the_processes_started_next(monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"seed": 3, "chunk_size": 32}))
    args = parse("--feather-max-wait", "12", "--feather-max-overtaking", "inf", "--feather-explore", "off")
    assert args.feather_max_wait == 12
    expected = FeatherOptions(chunk_size=32, seed=3, max_wait=12, max_overtaking=float("inf"), explore=False)
    assert FeatherOptions.from_environment() == expected


def test_what_nobody_needs_first_has_no_flag():
    """The variable sets it, and fourteen flags remain."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = {action.dest for action in parser._actions} - {"help"}
    assert len(flags) == 14
    alone = ("seed", "chunk_size", "max_wait_rounds", "record_plan", "record_trace_mb", "record_trace_hours")
    without = {f"feather_{name}" for name in alone}
    assert flags | without == {f"feather_{name}" for name in FeatherOptions.__dataclass_fields__}
    assert not flags & without


def test_prefixes_gather_unless_told_not_to():
    assert FeatherOptions().gather
    for word in ("off", "on"):
        parse("--feather-gather", word)
        assert FeatherOptions.from_environment().gather == (word == "on")
    assert not FeatherOptions().updated({"gather": "off"}).gather  # may change while a server runs


def test_prefill_is_paced_where_it_can_be_unless_told_otherwise():
    assert FeatherOptions().pace is None
    for word, pace in (("0.25", 0.25), ("0", 0.0), ("auto", None)):
        parse("--feather-pace", word)
        assert FeatherOptions.from_environment() == FeatherOptions(pace=pace)
        assert FeatherOptions(pace=3.0).updated({"pace": word}).pace == pace  # may change while a server runs
    assert FeatherOptions(pace=3.0).updated({"pace": None}).pace is None


def test_running_requests_stand_still_without_a_bound_unless_one_is_named():
    assert FeatherOptions().tbt is None
    parse("--feather-tbt", "250")
    assert FeatherOptions.from_environment() == FeatherOptions(tbt=250.0)
    assert FeatherOptions(tbt=250.0).updated({"tbt": None}).tbt is None  # may change while a server runs


def test_nothing_is_promised_unless_bounds_are_named():
    assert FeatherOptions().slo is None
    parse("--feather-slo", "mooncake")
    assert FeatherOptions.from_environment() == FeatherOptions(slo="mooncake")
    assert FeatherOptions(slo="mooncake").updated({"slo": None}).slo is None  # may change while a server runs


def test_without_flags_the_variable_is_left_alone(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"seed": 3}')
    parse()
    assert FeatherOptions.from_environment() == FeatherOptions(seed=3)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--feather-max-wait", "-3", "expected seconds"),
        ("--feather-policy-file", "/no/such/file.json", "no such file"),
        ("--feather-row-order", "yes", "expected on or off"),
        ("--feather-gather", "no", "expected on or off"),
        ("--feather-pat-prefill", "yes", "expected on, auto or off"),
        ("--feather-pace", "-1", "expected seconds, 0 or more"),
        ("--feather-tbt", "0", "expected milliseconds, more than 0"),
        ("--feather-tbt", "inf", "expected milliseconds, more than 0"),
        ("--feather-slo", "ttft=2", "give both bounds, ttft and tbt"),
        ("--feather-slo", "fast", "expected ttft=SECONDS, tbt=MS"),
        ("--feather-slo", "tbt=50", "give both bounds, ttft and tbt"),
        ("--feather-pace", "nan", "expected seconds, 0 or more"),
        ("--feather-pace", "soon", "expected seconds, 0 or more"),
        ("--feather-tbt", "abc", "expected milliseconds, more than 0"),
        ("--feather-max-overtaking", "most", "expected a number of at least 0, or inf"),
        ("--feather-slo", "ttft=2,tbt=50,tpot=30", "a server cannot promise tpot; leave it out"),
        ("--feather-slo", "9\n" * 9000, "expected ttft=SECONDS, tbt=MS"),
    ],
)
def test_a_mistake_in_a_flag_ends_parsing_with_one_line(flag, value, says, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(flag, value)
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"error: {flag} " in last and says in last and len(last) < 250


def test_a_foreign_policy_file_is_refused_while_parsing(tmp_path, capsys):
    path = tmp_path / "policy.json"
    path.write_text('{"format": "something else"}')
    with pytest.raises(SystemExit):
        parse("--feather-policy-file", str(path))
    assert "policy.json is not a policy file" in capsys.readouterr().err.splitlines()[-1]


def test_help_lists_every_flag_with_its_default():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for name in ("policy-file", "max-wait", "explore", "row-order", "gather", "pace"):
        assert f"--feather-{name}" in text
    assert "Default: 120.0." in text and "Default: on." in text
    assert "--feather-pace SECONDS|auto" in text and "0.1 s" in text and "Default: auto." in text


def test_what_is_off_by_default_may_be_named_alone():
    for words, allowed in ((["--feather-allow-switch"], True), (["--feather-allow-switch", "off"], False)):
        parse(*words, "--feather-max-wait", "3")
        assert switch_allowed() is allowed and FeatherOptions.from_environment().max_wait == 3
    assert not switch_allowed({}) and not switch_allowed({VARIABLE: "{ not read"})
    with pytest.raises(FeatherError, match="not JSON"):
        switch_allowed({VARIABLE: '{"allow_switch": tru'})


def test_options_of_another_policy_on_the_same_server(tmp_path):
    path = tmp_path / "policy.json"
    path.touch()
    before = FeatherOptions(policy_file=str(path), chunk_size=32)
    assert before.updated({}) == before
    assert before.updated({"policy_file": None, "explore": "off"}) == FeatherOptions(chunk_size=32, explore=False)
    for given, says in (
        ({"record_plan": None}, "options: record_plan cannot change while the server runs"),
        ({"chunk_size": None}, "options: chunk_size=None: expected a whole number"),
        ({"seeds": 1}, "options: unknown option 'seeds'"),
    ):
        with pytest.raises(FeatherError, match=says):
            before.updated(given)


def test_a_mistake_in_a_flag_names_the_flag():
    with pytest.raises(FeatherError, match=r"^--feather-slo 'ttft=2': give both bounds, ttft and tbt$"):
        parse_flag("slo", "ttft=2")
    assert parse_flag("pat_prefill", "true") == "on"
