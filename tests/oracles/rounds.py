"""A batch builder over a small tree, and admission rounds as the scheduler holds them."""

from feather_sglang.scheduling.admission.batch_builder import BatchBuilder
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree


def builder(policy=None, **options):
    return BatchBuilder(ChunkedHashTree(chunk_size=2, seed=1), policy or make_policy("always-add"), **options)


def run_round(b, now=0.0, reward=None, fixed=None, pending=0, slots=1000):
    """Everybody proposed is admitted, as long as there are slots."""
    b.begin_round(now, reward, None, fixed, pending_tokens=pending)
    admitted = []
    while len(admitted) < slots and (r := b.propose(len(b.cht.active), 1.0)) is not None:
        b.admitted(r)
        admitted.append(r)
    b.end_round()
    return admitted


def judged_round(b, found, prompt, free, now=0.0, slots=1000):
    """As the adapter does it: whoever is proposed may be passed over. Those admitted are computed when it ends.

    `found` tells what the cache has of a request's `prompt` tokens.
    """
    b.begin_round(now, None)
    admitted = []
    while len(admitted) < slots and (r := b.propose(len(b.cht.active), 1.0)) is not None:
        assert r in b.cht.waiting and len(admitted) < 1000
        cached = found(r)
        if b.passes_over(r, cached, prompt - cached, free):
            assert b.is_settled(r)
            assert r in b.cht.waiting | b.cht.held
        else:
            b.admitted(r, cached)
            admitted.append(r)
        b.cht.check_invariants()
    b.end_round()
    b.cht.check_invariants()
    assert not b.cht.held and not b.cht.deferred
    for r in list(b.passing_over.computing):
        b.passing_over.computed(r)
    return admitted
