"""Results of an earlier comparison in the folder of a new one."""

import json

import pytest

from feather_sglang.compare.results import PLOTS, RESULTS, remove_earlier
from feather_sglang.errors import FeatherError

REPLAY = {"runs": {"fcfs": {}, "feather @0.5x": {}}, "failed": {"lpm": "out of memory"}}
SERVERS = {"runs": {"fcfs": {}}, "records": [{"name": "fcfs", "log": "/elsewhere/pat+fcfs.log"}, {"name": "lpm"}]}
OWN = {
    "replay": (REPLAY, ["fcfs.log", "feather @0.5x.log", "lpm.log"]),
    "server": (SERVERS, ["logs/pat+fcfs.log"]),
    "nothing that can be read": ("", []),
}


@pytest.mark.parametrize("engine", OWN)
def test_nothing_of_an_earlier_run_is_left(tmp_path, engine):
    content, logs = OWN[engine]
    users = [tmp_path / name for name in ("notes.log", "logs/other.log", "plot.png")]
    own = [tmp_path / name for name in (RESULTS, *PLOTS, *logs)]
    (tmp_path / "logs").mkdir()
    for path in (*users, *own):
        path.write_text("text")
    (tmp_path / RESULTS).write_text(json.dumps(content) if content else "{")
    with pytest.raises(FeatherError, match="--overwrite"):
        remove_earlier(tmp_path / RESULTS, tmp_path, False)
    assert all(path.exists() for path in (*users, *own))
    remove_earlier(tmp_path / RESULTS, tmp_path, True)
    assert all(path.exists() for path in users) and not any(path.exists() for path in own)
    remove_earlier(tmp_path / RESULTS, tmp_path, False)  # there is none any more


def test_no_log_outside_the_folder_is_removed(tmp_path):
    out, outside = tmp_path / "out", tmp_path / "mine.log"
    out.mkdir()
    outside.write_text("text")
    (out / RESULTS).write_text(json.dumps({"runs": {"../mine": {}}, "records": [{"log": "../../mine.log"}]}))
    remove_earlier(out / RESULTS, out, True)
    assert outside.exists() and not (out / RESULTS).exists()
