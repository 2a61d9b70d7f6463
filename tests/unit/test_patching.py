"""`feather patch`: strict, all or nothing, and back to the byte; on small trees, and the shape of the real series."""

import difflib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang.adapter import hooks
from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.patching import series as series_module
from feather_sglang.patching.series import PREFIX, Series, releases
from feather_sglang.patching.site import REGISTRY, Site

RELEASE = "9.8.7"
ONE, TWO, STILL = "sglang/srt/one.py", "sglang/srt/two.py", "sglang/srt/managers/still.py"
INFO = f"sglang-{RELEASE}.dist-info"
BEFORE = {
    ONE: "".join(f"line {number}\n" for number in range(40)),
    TWO: "first\nsecond\n\x0cform feed, \u2028 separator\nlast\n",
    STILL: "untouched\n",
}
AFTER = {
    **BEFORE,
    ONE: BEFORE[ONE].replace("line 3\n", "line three\nand a half\n") + "line 40\n",
    TWO: BEFORE[TWO].replace("second\n", ""),
    REGISTRY: "SCHEDULE_POLICY_API_VERSION = 1\n",
}


def lines_of(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n")[:-1]]


def patch_text(before: dict[str, str], after: dict[str, str]) -> str:
    """A patch as git writes it, with a test of SGLang's own that no installation has."""
    text = "Subject: [PATCH 1/1] change it\n---\n"
    for name in sorted(after):
        if before.get(name) != after[name]:
            old = f"a/{PREFIX}{name}" if name in before else "/dev/null"
            text += f"diff --git a/{PREFIX}{name} b/{PREFIX}{name}\n"
            text += "".join(
                difflib.unified_diff(lines_of(before.get(name, "")), lines_of(after[name]), old, f"b/{PREFIX}{name}")
            )
    return text + "diff --git a/test/t.py b/test/t.py\n--- /dev/null\n+++ b/test/t.py\n@@ -0,0 +1,1 @@\n+pass\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())


def content(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def patches(tmp_path, monkeypatch):
    """A series for one release, of two patches."""
    folder = tmp_path / "patches"
    half = {**BEFORE, ONE: AFTER[ONE]}
    write(folder / RELEASE, {"0001-one.patch": patch_text(BEFORE, half), "0002-two.patch": patch_text(half, AFTER)})
    monkeypatch.setattr(series_module, "folder", lambda: folder)
    return folder


@pytest.fixture
def root(tmp_path):
    """An installation of that release."""
    root = tmp_path / "site"
    record = "".join(f"{name},sha256=abc,1\n" for name in BEFORE)
    metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {RELEASE}\n"
    write(root, {**BEFORE, f"{INFO}/METADATA": metadata, f"{INFO}/RECORD": record})
    (root / ONE).chmod(0o640)
    return root


def test_apply_gives_what_the_series_says_and_revert_what_was_there(patches, root):
    before, mode = content(root), (root / ONE).stat().st_mode
    time = (root / ONE).stat().st_mtime_ns
    site = Site.find(root)
    assert site.apply() == sorted(name for name in AFTER if AFTER[name] != BEFORE.get(name))
    assert {name: text.decode() for name, text in content(root).items() if name in AFTER} == AFTER
    assert site.state() == "patched" and (root / ONE).stat().st_mode == mode
    assert Site.find(root).revert() == sorted(name for name in AFTER if AFTER[name] != BEFORE.get(name))
    assert content(root) == before
    assert (root / ONE).stat().st_mode == mode and (root / ONE).stat().st_mtime_ns == time
    assert site.state() == "not patched"


def test_all_that_is_added_is_in_the_list_by_which_pip_uninstalls(patches, root):
    Site.find(root).apply()
    listed = {line.split(",")[0] for line in (root / INFO / "RECORD").read_text().splitlines()}
    assert set(content(root)) - listed == {f"{INFO}/METADATA", f"{INFO}/RECORD"}  # which the fixture does not list


@pytest.mark.parametrize("number", range(40))
def test_any_changed_line_of_context_is_refused_with_file_and_line_and_nothing_is_written(patches, root, number):
    text = lines_of(BEFORE[ONE])
    text[number] = "changed\n"
    write(root, {ONE: "".join(text)})
    before = content(root)
    in_context = number <= 6 or number >= 37  # three lines about each change
    if in_context:
        with pytest.raises(FeatherError, match=rf"{ONE}:{number + 1}: has 'changed' for 'line {number}'"):
            Site.find(root).apply()
        assert content(root) == before
    else:
        site = Site.find(root)
        site.apply()
        site.revert()
        assert content(root) == before


def test_a_missing_file_and_one_that_exists_already_are_refused(patches, root):
    (root / TWO).unlink()
    with pytest.raises(FeatherError, match=f"{TWO}: not there"):
        Site.find(root).apply()
    write(root, {TWO: BEFORE[TWO], REGISTRY: "mine\n"})
    before = content(root)
    with pytest.raises(FeatherError, match="has extension points of its own"):
        Site.find(root).apply()
    assert content(root) == before and Site.find(root).state() == "has extension points of its own"


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_a_failure_on_the_way_leaves_everything_as_it_was(patches, root, monkeypatch, fails_at):
    before, replace, count = content(root), os.replace, 0

    def breaks(source, target):
        nonlocal count
        count += 1
        if count == fails_at:
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", breaks)
    with pytest.raises(OSError, match="no space left"):
        Site.find(root).apply()
    assert content(root) == before


def killed_at(site, action, moment):
    """Run an action in a process that is killed at its n-th change of the disk; whether it came so far."""
    changes = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.utime")
    child = os.fork()
    if child == 0:
        count = 0

        def kill(event, arguments):
            nonlocal count
            if event in changes or (event == "open" and (arguments[2] or 0) & os.O_CREAT):
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(kill)
            getattr(site, action)()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_killed_at_any_moment_it_is_whole_or_said_to_be_in_part_and_the_next_command_mends_it(patches, root, action):
    before, folders = content(root), set(root.rglob("*"))
    site = Site.find(root)
    site.apply()
    patched = content(root)
    site.revert()
    moment = 1
    while True:
        if action == "revert":
            site.apply()
        if not killed_at(site, action, moment):
            break
        state, now = site.state(), {name: text for name, text in content(root).items() if ".feather" not in name}
        assert (state == "patched") <= (now == patched), (moment, state)
        assert (state == "not patched") <= (now == before), (moment, state)
        if site.is_patched:
            site.revert()
        site.apply()
        assert content(root) == patched, moment
        site.revert()
        assert content(root) == before and folders >= set(root.rglob("*")) - {(root / REGISTRY).parent}, moment
        moment += 1
    assert moment > 10


def test_what_is_added_comes_last_so_that_nothing_starts_in_part(patches, root, monkeypatch):
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append(Path(new).name), replace(old, new)))
    Site.find(root).apply()
    assert order[-1] == Path(REGISTRY).name


def test_a_file_that_cannot_be_replaced_does_not_keep_the_others_from_being_put_back(patches, root, monkeypatch):
    before, replace = content(root), os.replace

    def breaks(source, target):
        if Path(target).name == Path(TWO).name:
            raise PermissionError("read-only")
        replace(source, target)

    monkeypatch.setattr(os, "replace", breaks)
    with pytest.raises(PermissionError, match="read-only"):
        Site.find(root).apply()
    assert content(root) == before


def test_two_at_once_are_kept_apart(patches, root):
    before = content(root)
    with Site.find(root)._alone():
        for action in ("apply", "revert"):
            with pytest.raises(FeatherError, match="is being patched by another process"):
                getattr(Site.find(root), action)()
    assert content(root) == before


def test_a_file_that_is_a_link_is_one_again(patches, root, tmp_path):
    cache = tmp_path / "cache.py"
    (root / ONE).rename(cache)
    (root / ONE).symlink_to(cache)
    site = Site.find(root)
    site.apply()
    assert cache.read_text() == BEFORE[ONE] and (root / ONE).read_text() == AFTER[ONE]
    site.revert()
    assert (root / ONE).readlink() == cache
    (root / ONE).unlink()
    (root / ONE).symlink_to("../../../cache.py")  # told from its place, not from that of the backup
    site.apply()
    site.revert()
    assert (root / ONE).readlink() == Path("../../../cache.py") and (root / ONE).read_text() == BEFORE[ONE]


def test_other_line_ends_and_other_encodings_are_refused_visibly(patches, root):
    write(root, {ONE: BEFORE[ONE].replace("\n", "\r\n")})
    with pytest.raises(FeatherError, match=r"one.py:1: has 'line 0\\r' for 'line 0'"):
        Site.find(root).apply()
    (root / ONE).write_bytes(BEFORE[ONE].replace("line 1\n", "Gr\xfc\xdfe\n").encode("latin-1"))
    with pytest.raises(FeatherError, match=r"one.py:2: has 'Gr.*' for 'line 1'"):
        Site.find(root).apply()


def test_an_apply_that_was_killed_half_way_can_be_reverted(patches, root):
    before = content(root)
    site = Site.find(root)
    site.apply()
    write(root, {TWO: BEFORE[TWO]})  # as if it had not come to this file
    (root / REGISTRY).unlink()
    site.revert()
    assert content(root) == before


def test_what_was_changed_after_patching_is_not_overwritten(patches, root):
    site = Site.find(root)
    site.apply()
    write(root, {TWO: "mine\n"})
    before = content(root)
    with pytest.raises(FeatherError, match=f"{TWO}: changed since it was patched"):
        site.revert()
    assert content(root) == before and site.state().endswith(TWO)
    with pytest.raises(FeatherError, match="revert first"):
        site.apply()


DAMAGED = [
    "", "{", "[]", "null", "{}", '{"files": 1}', '{"files": {}}', '{"files": []}', '{"files": {"a.py": 1}}',
    '{"files": {"a.py": {"before": "x"}}}', '{"files": {"a.py": {"before": 1, "after": "x"}}}',
    '{"files": {"../a.py": {"before": null, "after": "x"}}}', '{"files": {"/a.py": {"before": null, "after": "x"}}}',
    r'{"files": {"\ud800": {"before": null, "after": "x"}}}', "[" * 100_000, b"\xff\xfe",
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_manifest_is_one_line_and_changes_nothing(patches, root, capsys, text):
    Site.find(root).apply()
    manifest = root / INFO / "feather_patch" / "manifest.json"
    manifest.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = content(root)
    capsys.readouterr()
    for action, status in (("check", 1), ("list", 0), ("apply", 2), ("revert", 2)):
        assert main(["patch", action, "--site", str(root)]) == status
        printed = capsys.readouterr()
        told = [line for line in (printed.out + printed.err).splitlines() if "damaged" in line]
        assert len(told) == 1 and str(manifest) in told[0] and "reinstall" in told[0]
        assert content(root) == before


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "a folder", "said to be new"])
def test_a_damaged_backup_is_not_put_in_place(patches, root, damage):
    site = Site.find(root)
    site.apply()
    kept = root / INFO / "feather_patch" / ONE
    manifest = kept.parents[2] / "manifest.json"
    if damage == "said to be new":
        entries = json.loads(manifest.read_text())
        entries["files"][ONE]["before"] = None
        manifest.write_text(json.dumps(entries))
    elif damage == "changed":
        kept.write_text(BEFORE[ONE].replace("line 7", "line 8"))
    elif damage == "cut":
        kept.write_text(BEFORE[ONE][:-1])
    else:
        kept.unlink()
        if damage == "a folder":
            kept.mkdir()
    before = content(root)
    with pytest.raises(FeatherError, match=f"^{ONE}: the backup in .* is damaged"):
        site.revert()
    assert content(root) == before


def test_a_backup_that_is_not_needed_may_be_damaged(patches, root):
    before = content(root)
    site = Site.find(root)
    site.apply()
    write(root, {ONE: BEFORE[ONE], f"{INFO}/feather_patch/{ONE}": "damaged"})  # put back by hand
    site.revert()
    assert content(root) == before


def test_files_that_another_installation_shares_by_hard_links_stay_as_they_are(patches, root, tmp_path):
    other = tmp_path / "other.py"
    os.link(root / ONE, other)
    Site.find(root).apply()
    assert other.read_text() == BEFORE[ONE]


def test_the_compiled_file_of_what_was_added_goes_too(patches, root):
    site = Site.find(root)
    site.apply()
    compiled = (root / REGISTRY).parent / "__pycache__" / "schedule_policy_registry.cpython-311.pyc"
    write(root, {compiled.relative_to(root).as_posix(): "code"})
    site.revert()
    assert not compiled.exists()


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_any_change_of_a_file_is_applied_as_git_means_it(tmp_path_factory, before, after):
    old, new = ({ONE: "".join(f"{number}\n" for number in numbers)} for numbers in (before, after))
    folder = tmp_path_factory.mktemp("series")
    write(folder / RELEASE, {"0001.patch": patch_text(old, new)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series_module, "folder", lambda: folder)
        made = Series(RELEASE).apply(lambda name: old[name].encode())
    assert made == ({ONE: new[ONE].encode()} if old != new else {})


# The command --------------------------------------------------------------------------------------------------------


def test_the_command(patches, root, capsys):
    site = ["--site", str(root)]
    before = content(root)
    assert main(["patch", "check", *site]) == 0 and "fits, 3 files would change" in capsys.readouterr().out
    assert content(root) == before
    assert main(["patch", "apply", *site]) == 0 and f"{REGISTRY}\n" in capsys.readouterr().out
    assert main(["patch", "check", *site]) == 0
    assert main(["patch", "list", *site]) == 0
    out = capsys.readouterr().out
    assert f"{RELEASE}  2 patches  <- {root}: patched" in out and "  change it" in out
    assert main(["patch", "apply", *site]) == 2 and "revert first" in capsys.readouterr().err
    assert main(["patch", "revert", *site]) == 0 and content(root) == before
    assert main(["patch", "revert", *site]) == 2 and "nothing to revert" in capsys.readouterr().err


def test_check_says_what_does_not_fit(patches, root, capsys):
    write(root, {ONE: "other\n"})
    assert main(["patch", "check", "--site", str(root)]) == 1
    assert f"does not fit: {ONE}:1: has 'other'" in capsys.readouterr().out


def test_a_release_without_patches_a_folder_without_sglang_and_a_checkout(patches, root, tmp_path, capsys):
    assert main(["patch", "apply", "--site", str(tmp_path / "nothing")]) == 2
    assert "no sglang is installed in" in capsys.readouterr().err
    write(root, {f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 1.2.3\n"})
    assert main(["patch", "apply", "--site", str(root)]) == 2
    assert f"no patches for sglang 1.2.3: there are some for {RELEASE}" in capsys.readouterr().err
    (root / INFO / "METADATA").rename(root / INFO / "PKG-INFO")
    (root / INFO).rename(root / "sglang.egg-info")
    assert main(["patch", "apply", "--site", str(root)]) == 2
    assert "installed from a checkout" in capsys.readouterr().err
    (root / "sglang").rename(root / "elsewhere")
    assert main(["patch", "apply", "--site", str(root)]) == 2
    assert "installed from a checkout" in capsys.readouterr().err


# The real series ----------------------------------------------------------------------------------------------------


def test_every_supported_release_has_a_series():
    assert tuple(releases()) == hooks.SUPPORTED


@pytest.mark.parametrize("release", hooks.SUPPORTED)
def test_a_series_is_four_patches_in_sglangs_own_words(release):
    series = Series(release)
    assert len(series.subjects()) == 4 and all(len(subject) <= 72 for subject in series.subjects())
    for path in series.files:
        text = path.read_text()
        added = [line for line in text.splitlines() if line.startswith("+")]
        assert not any("feather" in line.lower() for line in added)
        assert re.search(r"^\+\+\+ b/test/registered/unit/managers/\w+\.py$", text, re.M), "a patch without a test"
        assert all(len(line) <= 101 for line in added)
