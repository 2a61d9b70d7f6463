"""The hook table against the installed SGLang."""

import pytest

from feather_sglang.adapter import hooks
from feather_sglang.adapter.hooks import HOOKS, SUPPORTED, Hook, exists, installed_version, mismatch, mismatches


def test_the_installed_sglang_fits():
    assert installed_version() in SUPPORTED
    assert mismatches() == []
    assert mismatches("pat") == [] and mismatches("switch") == []


@pytest.mark.parametrize("kind", ["start", "scheduler", "switch", "pat", "calls"])
def test_every_kind_is_in_the_table(kind):
    assert any(hook.kind == kind for hook in HOOKS)


def test_a_renamed_function_is_reported():
    gone = Hook("sglang.srt.managers.scheduler.Scheduler.no_such_method", "scheduler", ("self",), "")
    assert "no_such_method: not found" in mismatch(gone)
    gone = Hook("sglang.srt.managers.no_such_module.thing", "scheduler", (), "")
    assert "not found" in mismatch(gone)


def test_what_some_releases_do_not_have_is_no_mismatch():
    gone = Hook("sglang.srt.server_args.ServerArgs.no_such_method", "start", ("self",), "", optional=True)
    assert mismatch(gone) is None and not exists(gone)
    changed = Hook("sglang.srt.server_args.ServerArgs.add_cli_args", "start", ("other",), "", optional=True)
    assert "expected (other, ...)" in mismatch(changed) and exists(changed)


def test_a_mismatch_counts_for_its_part_only(monkeypatch):
    broken = Hook("sglang.srt.managers.no_such_module.thing", "calls", (), "", part="pat")
    monkeypatch.setattr(hooks, "HOOKS", (*HOOKS, broken))
    assert mismatches() == [] and len(mismatches("pat")) == 1


def test_a_changed_signature_is_reported_with_both_sides():
    hook = Hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", "scheduler", ("self", "request"), "")
    assert "takes (self, req" in mismatch(hook) and "expected (self, request, ...)" in mismatch(hook)


def test_a_body_that_no_longer_works_as_expected_is_reported():
    hook = Hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", "scheduler", ("self",), "", ("gone",))
    assert "does not use gone any more" in mismatch(hook)


def test_an_unsupported_version_is_reported_first(monkeypatch):
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.6.0")
    assert mismatches() == [f"sglang 0.6.0 is not one of {SUPPORTED[0]} to {SUPPORTED[-1]}"]
