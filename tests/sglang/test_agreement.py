"""All ranks form the same batch although their clocks and what they measure differ."""

import random
import secrets
from array import array

import torch.distributed as dist
import torch.multiprocessing as mp

from effort import newest_is_enough
from feather_sglang.adapter.scheduler.agreement import Agreement
from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.deferrals import PrefixBatching
from feather_sglang.scheduling.admission.gate import PrefillDelay
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from oracles.rounds import admit, defers, propose

pytestmark = newest_is_enough


class SometimesShort(PrefixBatching):
    """The real rule, where memory is short whenever prompts of more than five prefixes wait or run."""

    def short(self, demand_tokens, running):
        return demand_tokens > 3000


def serve(rank, store, results, agree):
    """One rank's scheduler: the shared request stream, but a clock, rewards and prefill times of its own."""
    secrets.randbits = random.Random(rank).getrandbits  # what follows is the same in every run
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    agreement = Agreement(dist.group.WORLD if agree else None)
    assert agreement.all(True) and agreement.all(rank == 0) == (rank == 0 and not agree)
    if agree:
        assert agreement.readings(Readings(rank + 1.5)) == Readings(1.5)
        mine = Readings(rank + 1.5, None if rank == 0 else 2.0, fixed_seconds=rank + 3.0)
        assert agreement.readings(mine) == Readings(1.5, None, fixed_seconds=3.0)
        mine = Readings(1.5, pair_tokens=rank + 2.0, least_decode_seconds=0.0 if rank == 0 else None)
        assert agreement.readings(mine) == Readings(1.5, pair_tokens=2.0, least_decode_seconds=0.0)
    builder = Admission(
        ChunkedHashTree(4, seed=agreement.secret()),
        make_policy("bandit", seed=0),
        max_wait=9.0,
        max_wait_rounds=40,
        prefix_batching=SometimesShort(0),
        prefill_delay=PrefillDelay(2.5),
    )
    stream, clock = random.Random(7), random.Random(rank)
    decisions, running = [], []
    for step in range(300):
        for i in range(stream.randrange(4)):
            group = stream.randrange(8)
            builder.arrived((step, i), array("q", [group] * 600 + [step]), most_tokens=1)
        fixed = clock.choice((None, 3 * clock.random()))
        measured = clock.random() * 1000, clock.random() * 0.01, fixed
        mine = Readings(step + clock.random(), *measured)
        builder.open_round(agreement.readings(mine), pending_tokens=int(stream.random() < 0.1))
        while len(running) < 12 and (r := propose(builder, len(running))) is not None:
            if defers(builder, r, 0, 601, 1 << 40):
                continue
            admit(builder, r)
            running.append(r)
        builder.close_round()
        order = builder.row_order(running)
        running = running if order is None else [running[i] for i in order]
        decisions.append(tuple(running))
        while running and stream.random() < 0.7:
            builder.finished(running.pop(stream.randrange(len(running))))
    results[rank] = decisions, builder.stats()["deferrals"]["batching"], builder.delayed_rounds
    dist.destroy_process_group()


def decisions_of_two_ranks(tmp_path, agree):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(serve, args=(tmp_path / "store", results, agree), nprocs=2)
        return results[0], results[1]


def test_two_ranks_agree_on_every_batch(tmp_path):
    first, second = decisions_of_two_ranks(tmp_path, agree=True)
    assert first == second
    decisions, batched, delayed_rounds = first
    assert len(set(decisions)) > 100 and batched > 20 and 20 < delayed_rounds < 200


def test_without_agreement_they_part(tmp_path):
    first, second = decisions_of_two_ranks(tmp_path, agree=False)
    assert first != second


def test_one_rank_needs_no_communication():
    mine = Readings(1.5, 10.0, own_seconds=2e-4)
    assert Agreement(None).readings(mine) == mine
