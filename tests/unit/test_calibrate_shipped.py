"""The profile that ships is what `feather calibrate` makes of the recordings in tests/data."""

import json
from pathlib import Path

from feather_sglang.cli import main
from feather_sglang.replay.profiles import load_profile

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def test_the_shipped_profile_is_the_fit_of_the_recordings(tmp_path, capsys):
    files = sorted(map(str, (DATA / "h200_calibration").glob("*.gz")))
    out = tmp_path / "h200.json"
    flags = ["--model", "qwen3-8b", "--profile", str(DATA / "h200_base.json"), "--out", str(out), "--from", *files]
    assert main(["calibrate", *flags]) == 0
    made, shipped = (
        json.loads(path.read_text()) for path in (out, ROOT / "feather_sglang" / "replay" / "profiles" / "h200.json")
    )
    assert made.keys() == shipped.keys() and made["name"] == shipped["name"] == "h200"
    for group in ("parameters", "host"):
        for name, entry in shipped[group].items():
            # Solvers differ in the last digits from one machine to another.
            assert abs(made[group][name]["value"] - entry["value"]) <= 0.01 * abs(entry["value"]) + 2e-7, name
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.count(" ms") == 2]
    steps = [float(ratio) for text, ratio in rows if text.startswith(("decode ", "prefill "))]
    stages = [float(ratio) for text, ratio in rows if "(fitted on)" in text or "(held out)" in text]
    assert len(steps) > 35 and max(abs(ratio - 1) for ratio in steps) < 0.10
    # The host's own speed differed by so much from one half-minute to the next.
    assert len(stages) == 18 and 0.8 < min(stages) and max(stages) < 1.5


def test_a_server_shows_the_memory_that_the_profile_has():
    profile = load_profile("h200")
    assert 0.85 < profile.memory_share < 0.92 and 150e9 < profile.memory_bytes < 151e9
