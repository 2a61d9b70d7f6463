"""All ranks form the same batch although their clocks and rewards differ."""

import random
from array import array

import torch.distributed as dist
import torch.multiprocessing as mp

from feather_sglang.adapter.agreement import Agreement
from feather_sglang.batch_builder import BatchBuilder
from feather_sglang.cht import ChunkedHashTree
from feather_sglang.policies import make_policy


def serve(rank, store, results, agree):
    """One rank's scheduler: the shared request stream, but a clock and rewards of its own."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    agreement = Agreement(dist.group.WORLD if agree else None)
    assert agreement.all(True) and agreement.all(rank == 0) == (rank == 0 and not agree)
    builder = BatchBuilder(
        ChunkedHashTree(4, seed=agreement.secret()), make_policy("bandit", seed=0), max_wait=0.5, max_wait_rounds=40
    )
    stream, clock = random.Random(7), random.Random(rank)
    decisions, running = [], []
    for step in range(300):
        for i in range(stream.randrange(4)):
            group = stream.randrange(4)
            builder.arrive((step, i), array("q", [group] * 40 + [step]))
        builder.begin_round(*agreement.readings(clock.random() * step, clock.random() * 1000))
        while len(running) < 12 and (r := builder.propose(len(running), 1.0)) is not None:
            builder.admitted(r)
            running.append(r)
        builder.end_round()
        order = builder.row_order(running)
        running = running if order is None else [running[i] for i in order]
        decisions.append(tuple(running))
        while running and stream.random() < 0.7:
            builder.leave_batch(running.pop(stream.randrange(len(running))))
    results[rank] = decisions
    dist.destroy_process_group()


def decisions_of_two_ranks(tmp_path, agree):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(serve, args=(tmp_path / "store", results, agree), nprocs=2)
        return results[0], results[1]


def test_two_ranks_agree_on_every_batch(tmp_path):
    first, second = decisions_of_two_ranks(tmp_path, agree=True)
    assert first == second
    assert len(set(first)) > 100


def test_without_agreement_they_part(tmp_path):
    first, second = decisions_of_two_ranks(tmp_path, agree=False)
    assert first != second


def test_one_rank_needs_no_communication():
    assert Agreement(None).readings(1.5, 10.0) == (1.5, 10.0)
    assert Agreement(None).readings(1.5, None) == (1.5, None)
