"""A batch builder over a small tree, and admission rounds as the scheduler holds them."""

from feather_sglang.batch_builder import BatchBuilder
from feather_sglang.cht import ChunkedHashTree
from feather_sglang.policies import make_policy


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
