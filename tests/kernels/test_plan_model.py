"""The modelled time of plans, by hand, and the report of benchmarks/bench_plan.py on splits and kept plans."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_checks import forests, plan_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_plan
import plan_batches
from plan_model import drift, model

from feather_kernels.costs import UnitCosts
from feather_kernels.trees import tree_forest

COSTS = UnitCosts(unit={8: 10.0, 64: 100.0, 128: 1000.0}, step={8: 1.0, 64: 10.0, 128: 100.0}, part=0, part_row=3)


def modelled(forest, **arguments):
    """ns, of four query heads to one KV head."""
    options = {"num_qo_heads": 4, "num_kv_heads": 1, "n_sm": 2, "split": "none", "costs": COSTS, "strategy": "naive"}
    plan = plan_of(forest, **{**options, **arguments})
    return [pytest.approx(1e3 * us) for us in model(plan)], plan


def test_whole_units_go_to_the_least_loaded_processor():
    """Of 1,100, 1,200 and 1,300 ns: the longest, and the other two."""
    forest = tree_forest((3,), (192,)).with_seq_len([64, 128, 192])
    assert modelled(forest, tiles=((128, 64),))[0] == [2300, 1800]
    assert modelled(forest, tiles=((128, 64),), n_sm=3)[0] == [1300, 1200]
    assert modelled(forest, tiles=((128, 64),), num_kv_heads=2, num_qo_heads=8)[0] == [3600, 3600]


def test_a_team_whose_other_one_is_idle_takes_half_as_long_again():
    """Units of 110 ns in a tile of two teams."""
    for requests, longest, even in ((2, 165, 165), (3, 220, 192.5), (4, 220, 220), (5, 385, 302.5)):
        assert modelled(tree_forest((requests,), (64,)), tiles=((64, 64),))[0] == [longest, even]


def test_tails_fill_what_teams_leave_idle_and_the_longest_takes_a_warps_time():
    """17 requests share 1,100 ns of a team; each has 11 ns of a warp, and a part of 12."""
    tiles = ((8, 16), (128, 64))
    alone, plan = modelled(tree_forest((4,), (16,)), tiles=tiles, tail_warps=3)
    assert plan.n_parts == 0 and alone == [22, 22]  # 44 ns for two processors
    assert modelled(tree_forest((1,), (16,)), tiles=tiles, tail_warps=3)[0] == [22, 5.5]  # twice 11, of three warps
    both, plan = modelled(tree_forest((1, 17), (64, 16)), tiles=tiles, tail_warps=3)
    spread = 17 * 11 + 3 * 4 * plan.n_parts
    assert plan.n_parts == 17 and both == [1100, (1100 + spread) / 2]


def test_tails_that_have_grown_take_longer():
    plan = modelled(tree_forest((2,), (64,)), tiles=((128, 64),))[1]
    assert model(plan, np.array([64, 65])).us == pytest.approx(1.2)


@given(
    forest=forests(tokens=500, tail=500), n_sm=st.sampled_from([1, 3, 20]), split=st.sampled_from(["rounds", "groups"])
)
def test_no_more_is_taken_than_one_processor_would_and_no_less_than_an_even_share(forest, n_sm, split):
    us, even = model(plan_of(forest, n_sm=n_sm, split=split))
    assert 0 < even <= us + 1e-9


def test_drift_is_in_token_heads():
    forest = tree_forest((3,), (100,)).with_seq_len([100, 70, 20])
    assert drift(modelled(forest, n_sm=2)[1]) == 10  # 100, and 70 with 20
    assert drift(modelled(forest, n_sm=4)[1]) == 100
    assert drift(modelled(forest, n_sm=1)[1]) == 0


def test_a_plan_is_followed_as_long_as_it_holds():
    forest = tree_forest((3,), (300,)).with_seq_len([300, 90, 200])
    plan = plan_of(forest, split="none")
    assert bench_plan.kept_steps(plan) == 90
    assert plan.valid_for(forest.seq_len + 90)[0] and not plan.valid_for(forest.seq_len + 91)[0]
    assert bench_plan.loss(forest, plan_of(forest, **bench_plan.HEADS), 0) == 0


def test_a_traces_batch_shares_the_full_blocks_of_its_prompts(tmp_path):
    lines = [
        {"input_length": 1100, "output_length": 50, "hash_ids": [1, 2, 3]},
        {"input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
        {"input_length": 600, "output_length": 2000, "hash_ids": [1, 9]},
        {"input_length": 700, "output_length": 0, "hash_ids": [7, 2]},
    ]
    forest = plan_batches._forest(lines)
    assert forest.seq_len.tolist() == [1125, 1024, 1600, 700]
    assert forest.shared_length.tolist() == [1024, 1024, 512, 0]
    for file in plan_batches.TRACES.values():
        (tmp_path / file).write_text("".join(json.dumps(line) + "\n" for line in lines * 80))
    sets = plan_batches.batch_sets(tmp_path)
    assert [sorted({forest.n_requests for forest in sets[name]}) for name in plan_batches.TRACES] == [[16, 64, 256]] * 2


def test_tables_of_splits_and_regrouping(capsys, monkeypatch, tmp_path):
    forest = tree_forest((1, 40), (4000, 300))
    monkeypatch.setattr(bench_plan, "batch_sets", lambda traces: {"some": [forest, tree_forest((9,), (3000,))]})
    out = tmp_path / "plan.json"
    assert bench_plan.main(["--tables", "splits", "regrouping", "--quick", "--json", str(out)]) == 0
    tables = json.loads(out.read_text())
    splits = {row["split"]: row for row in tables["splits"]}
    assert splits["rounds"]["over rounds"] == 1 and splits["rounds, spread evenly"]["most"] <= 1
    for capacity in bench_plan.CAPACITIES:  # shares are 1,500 and 1,600 token-heads
        bounded, always = splits[f"rounds, or groups {capacity}"], splits[f"groups {capacity}"]
        assert bounded["over rounds"] == (always["over rounds"] if capacity == 1024 else 1)
    (some, every) = tables["regrouping"]
    assert some | {"set": "all"} == every and some["by eq. 4"] <= some["kept"]
    assert "over rounds" in capsys.readouterr().out


def test_the_model_goes_with_what_was_measured():
    (row,) = bench_plan.agreement()
    assert (
        row["rows"] == 54 and 1.1 < float(row["modelled / measured"]) < 1.3 and float(row["correlation of logs"]) > 0.7
    )


def test_a_folder_without_traces_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"--traces: .*mooncake_conversation.jsonl: No such file"):
        bench_plan.main(["--tables", "splits", "--traces", str(tmp_path)])
