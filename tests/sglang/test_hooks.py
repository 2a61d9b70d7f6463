"""The hook table against the installed SGLang."""

import os
import sys
from types import SimpleNamespace

import pytest
from harness import Server
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from feather_sglang.adapter import hooks, plugin, start_up
from feather_sglang.adapter.attention import registration
from feather_sglang.adapter.hooks import (
    CALLBACKS,
    EXTENSION_POINTS,
    HOOKS,
    SUPPORTED,
    Hook,
    exists,
    installed_version,
    misfit,
    mismatch,
    mismatches,
)
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError


def test_the_release_that_dev_py_asked_for_is_the_one_that_runs():
    """Else the tests of one end of the supported range would pass for the other."""
    import sglang

    assert sglang.__version__ == installed_version() == os.environ.get("FEATHER_TESTED_SGLANG", sglang.__version__)


def test_the_installed_sglang_fits():
    assert installed_version() in SUPPORTED
    assert mismatches() == []
    assert mismatches("pat") == [] and mismatches("switch") == []


@pytest.mark.parametrize("kind", ["start", "server", "scheduler", "switch", "pat", "calls"])
def test_every_kind_is_in_the_table(kind):
    assert any(hook.kind == kind for hook in HOOKS)


def test_the_doctor_names_them_all(capsys):
    main(["doctor", "--verbose"])
    shown = capsys.readouterr().out
    assert [hook.target for hook in HOOKS if hook.target.removeprefix("sglang.srt.") not in shown] == []


@pytest.mark.parametrize("name", ["create_decode_backend", "create_draft_extend_backend"])
def test_where_drafts_by_pat_are_made_is_among_them(monkeypatch, name):
    monkeypatch.delattr(DraftBackendFactory, name)
    assert f"DraftBackendFactory.{name}: not found" in misfit("pat") and misfit() is None


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


@pytest.mark.parametrize("version", ["0.5.24", "0.5.23.post1", "0.5.100"])
def test_a_newer_patch_release_is_used_if_its_hooks_fit_and_said_to_be_untested(monkeypatch, version):
    monkeypatch.setattr(hooks, "installed_version", lambda: version)
    assert mismatches() == [] and f"sglang {version} is newer than {SUPPORTED[-1]}" in hooks.untested(version)
    gone = Hook("sglang.srt.managers.scheduler.Scheduler.no_such_method", "scheduler", ("self",), "")
    monkeypatch.setattr(hooks, "HOOKS", (gone,))
    assert len(mismatches()) == 1  # it says which hook, not the number


@pytest.mark.parametrize("version", [None, "0.5.16", "0.6.0", "0.5.24rc1", "1.5.24", "0.5.24.dev3", *SUPPORTED])
def test_other_releases_are_not_taken_for_newer_ones(version):
    assert not hooks.is_newer_patch(version) and hooks.untested(version) is None
    assert hooks.is_usable(version) == (version in SUPPORTED)


def test_a_server_on_a_newer_release_says_so_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("FEATHER_OPTIONS", "")
    for module in (hooks, start_up):
        monkeypatch.setattr(module, "installed_version", lambda: "0.5.99")
    one = Server(tmp_path, "feather")
    try:
        said = [record.getMessage() for record in caplog.records if "newer than" in record.getMessage()]
        assert len(said) == 1 and one.feather is not None
    finally:
        one.close()


def test_an_unsupported_version_is_reported_first(monkeypatch):
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.6.0")
    assert mismatches() == [f"sglang 0.6.0 is not one of {SUPPORTED[0]} to {SUPPORTED[-1]}"]


def test_an_sglang_without_the_registry_of_backends_runs_the_policies_and_refuses_pat(monkeypatch):
    import sglang.srt.layers.attention as package

    monkeypatch.setitem(sys.modules, f"{package.__name__}.attention_registry", None)
    monkeypatch.delattr(package, "attention_registry")
    registration.register_backend()  # the plugin loads
    assert mismatches() == []
    args = SimpleNamespace(schedule_policy="fcfs", attention_backend=None, decode_attention_backend="pat")
    with pytest.raises(
        FeatherError, match=r"does not fit --decode-attention-backend pat: .*register_attention_backend"
    ):
        plugin.check_server_args(lambda args: None, args)


def test_a_series_that_was_applied_in_part_is_said(monkeypatch):
    monkeypatch.setattr(hooks, "extension_points", lambda: EXTENSION_POINTS)
    for name in CALLBACKS:
        monkeypatch.setattr(SchedulePolicy, name, None, raising=False)
    whole = misfit()
    monkeypatch.delattr(SchedulePolicy, "order_rows")
    assert "its extension points lack order_rows: apply the whole series" in misfit()
    assert "lack" not in (whole or "") and "lack" not in (misfit("pat") or "")
