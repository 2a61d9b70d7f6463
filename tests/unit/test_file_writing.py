"""Files that commands write: which files they replace, and what is left where they cannot be written."""

import json
import os
import stat

import pytest
from rich.console import Console

from feather_sglang.cli import main
from feather_sglang.errors import FeatherError
from feather_sglang.file_writing import replace_text, write_json
from feather_sglang.replay import jobs, processes, trace_cli
from feather_sglang.replay.traces import load_trace, save_trace
from feather_sglang.replay.workloads import no_sharing
from feather_sglang.scheduling.policies import load_policy, make_policy

WRITERS = {
    "trace": (lambda path: save_trace(no_sharing(requests=2), path), load_trace),
    "policy file": (lambda path: make_policy("bandit").save(path), load_policy),
    "results": (lambda path: write_json(path, [1]), lambda path: json.loads(path.read_text())),
}


@pytest.fixture(params=WRITERS)
def writer(request):
    return request.param, *WRITERS[request.param]


def test_a_pipe_stays_a_pipe(writer, tmp_path):
    what, write, _ = writer
    os.mkfifo(tmp_path / "f")
    with pytest.raises(FeatherError, match=f"cannot write {what} .*/f: it exists and is no regular file"):
        write(tmp_path / "f")
    assert stat.S_ISFIFO((tmp_path / "f").stat().st_mode) and os.listdir(tmp_path) == ["f"]


def test_a_folder_stays_a_folder(writer, tmp_path):
    what, write, _ = writer
    (tmp_path / "f").mkdir()
    with pytest.raises(FeatherError, match=f"cannot write {what} .*/f: it exists and is no regular file"):
        write(tmp_path / "f")
    assert (tmp_path / "f").is_dir() and os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("old", ["an old file", None])
def test_a_link_stays_a_link(writer, tmp_path, old):
    _, write, read = writer
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "target"
    if old is not None:
        target.write_text(old)
    (tmp_path / "f").symlink_to(target)
    write(tmp_path / "f")
    assert (tmp_path / "f").is_symlink() and not target.is_symlink() and read(target)
    assert os.listdir(tmp_path / "there") == ["target"]


def test_a_full_disk_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    (tmp_path / "f").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FeatherError, match=r"cannot write notes .*/f: No space left on device"):
        replace_text(tmp_path / "f", "new", "notes")
    assert (tmp_path / "f").read_text() == "old" and os.listdir(tmp_path) == ["f"]


def test_what_the_system_refuses_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    def full(args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_cli, "make", full)
    assert main(["trace", "make", "--out", str(tmp_path / "t")]) == 2
    assert capsys.readouterr().err == "feather: error: [Errno 28] No space left on device\n"


def test_a_log_that_cannot_be_written_ends_the_command_before_its_child_starts(tmp_path):
    (tmp_path / "fcfs.log").mkdir()
    job = jobs.Job("fcfs", no_sharing(requests=1), None, {}, {})
    with pytest.raises(IsADirectoryError, match=r"fcfs\.log"):
        processes.run_jobs([job], 1, tmp_path, Console(quiet=True))


def test_a_folder_in_the_place_of_the_policy_file_is_found_before_training(tmp_path, capsys):
    (tmp_path / "policy.json").mkdir()
    assert main(["train", "--policy", "bandit", "--out", str(tmp_path / "policy.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("feather: error: cannot write policy file") and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["policy.json"]
