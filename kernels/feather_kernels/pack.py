"""The pack strategies by name, and the traffic model by which they are compared.

A strategy decides, for every edge of the forest, whether the positions that the parent carries are merged into the
child's pack or stay in a pack of their own; a request's private tail is a child with one request. The decisions are
made in ``csrc/planner/pack.h``.

The traffic model counts bytes per KV head (PAT 5.1, with the bytes of this kernel in place of its constants):

- a pack loads each of its KV tokens once: ``2 * head_dim * 2`` bytes, K and V in 16 bits;
- a request with more than one part writes and reads all but the one that closes it: ``2 * 2 * G * (head_dim + 4)``
  bytes each, for each of its G query heads the output in 16 bits, its step and its log-sum-exp in fp32. A request's
  last part closes it if its pack has no other member, as that of a private tail; with ``merge="kernel"`` none does. A
  request with one part has no such bytes.

So merging a child of s requests into a carried range of L tokens pays when ``G * s >= L`` (nearly; exactly with
``(head_dim + 4) / head_dim``). PAT publishes ``4 * s >= L``, from a model that knows neither G nor V: use
``profit_factor=4`` for that rule.

``time`` minimises another model, ns of a processor for one KV head: work units, their steps, and parts (``costs.py``).
KV split is not in it. A tail's unit is in every plan; a range that is merged into it costs its share of a step.
"""

STRATEGIES = {
    "query": "each request alone over its whole sequence, as a kernel without sharing",
    "relay": "RelayAttention: the first shared level in one pack, the rest per request",
    "two-phase": "ChunkAttention: shared nodes first, in chunks of `shared_chunk` tokens, then each request's tail",
    "naive": "a pack per node",
    "compute": "FastTree's greedy choice, which minds padding of tiles (Feather 2.9.5, algorithm 1)",
    "profit": "PAT's algorithm 1: merge where the parts saved weigh at least the KV loaded again",
    "optimal": "the exact minimum of the traffic model (plus `item_overhead` a pack), O(nodes * depth)",
    "time": "nearly the least modelled time of the processors (`costs.UnitCosts`), O(nodes * depth)",
}
SPLITS = {
    "none": "packs are not cut",
    "mean": "PAT 6: no item longer than the items' mean",
    "balanced": "no chunk longer than `alpha` (by tile) of one processor's even share of all tokens; what single warps "
    "take so that their last round is even",
    "rounds": "balanced, and packs in large tiles so that modelled time is least (`costs.UnitCosts`)",
    "groups": "PackInfer 3.1: no chunk longer than `alpha` (by tile) of `group_capacity`, whatever the batch has",
}
MERGES = {
    "fused": "the item of a request's last part waits for the other parts and writes the result",
    "kernel": "every part of a request with several is written; a second kernel combines them",
}
