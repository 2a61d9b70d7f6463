"""Admission over a small tree, and rounds as the scheduler holds them."""

from math import inf

from feather_sglang.scheduling.admission.admission import Admission
from feather_sglang.scheduling.admission.types import Batch, Proposal, Verdict
from feather_sglang.scheduling.meters.readings import Readings
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.tree.cht import ChunkedHashTree


def builder(policy=None, **options):
    return Admission(ChunkedHashTree(chunk_size=2, seed=1), policy or make_policy("always-add"), **options)


def open_round(b, now, reward=None, *readings, pending_tokens=0):
    b.open_round(Readings(now, reward, *readings), pending_tokens=pending_tokens)


def propose(b, size, has_room=True):
    return b.propose(Batch(size, has_room))


def admit(b, r, cached_tokens=None):
    b.admitted(r, cached_tokens)


def skip(b, r):
    """The engine cannot take it now."""
    b.unavailable(r)


def defers(b, r, cached, missing, free):
    """Whether any rule but the one about memory ahead does."""
    return b.check(Proposal(r, cached, missing, free, inf)) is not Verdict.ADMIT


def fits(b, r, available):
    """What the rule about memory ahead says, as if it had been asked."""
    proposal = Proposal(r, 0, 0, 0, available)
    if b.rules[-1].check(proposal, b.round) is Verdict.ADMIT:
        return True
    b.deferred[Verdict.KV_BUDGET] += 1
    return False


def run_round(b, now=0.0, reward=None, fixed=None, pending=0, slots=1000):
    """Everybody proposed is admitted, as long as there are slots."""
    open_round(b, now, reward, None, fixed, pending_tokens=pending)
    admitted = []
    while len(admitted) < slots and (r := propose(b, len(b.tree.active))) is not None:
        admit(b, r)
        admitted.append(r)
    b.close_round()
    return admitted


def judged_round(b, found, prompt, free, now=0.0, slots=1000):
    """As the adapter does it: whoever is proposed may be deferred. Those admitted are computed when it ends.

    `found` tells what the cache has of a request's `prompt` tokens.
    """
    open_round(b, now)
    admitted = []
    while len(admitted) < slots and (r := propose(b, len(b.tree.active))) is not None:
        assert r in b.tree.waiting and len(admitted) < 1000
        cached = found(r)
        if defers(b, r, cached, prompt - cached, free):
            assert b.round.open_proposal is None
            assert r in b.tree.waiting | b.tree.held
        else:
            admit(b, r, cached)
            admitted.append(r)
        b.tree.check_invariants()
    b.close_round()
    b.tree.check_invariants()
    assert not b.tree.held and not b.tree.deferred
    for r in list(b.state.deferrals.in_flight):
        b.computed(r)
    return admitted
