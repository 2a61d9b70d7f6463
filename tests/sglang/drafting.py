"""SGLang's speculative decoding on a CPU: its device code of a few lines each, from its definition in torch.

SGLang has these as kernels for GPUs. The workers, the scheduler and everything between them are its own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import ModuleType

import torch
from plain_attention import PlainAttention


def reconstruct_indices_from_tree_mask(mask, lengths, positions, index, next_token, next_sibling, requests, drafts):
    """Positions and links of trees of drafts, in place: a draft's parent is the last one before it on its path."""
    trees = mask.view(requests, drafts, drafts).bool()
    for request in range(requests):
        parents = [-1]
        for draft in range(1, drafts):
            parents.append(int(torch.nonzero(trees[request, draft, :draft]).max()))
        depth = trees[request].sum(1) - 1
        positions.view(-1)[request * drafts : (request + 1) * drafts] = depth + lengths[request]
        index[request] = torch.arange(drafts) + request * drafts
        for draft in range(drafts):
            children = [other for other in range(drafts) if parents[other] == draft]
            later = [other for other in range(draft + 1, drafts) if draft and parents[other] == parents[draft]]
            next_token[request, draft] = children[0] if children else -1
            next_sibling[request, draft] = later[0] if later else -1


def verify_tree_greedy(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling,
    target_predict, topk=-1,
):  # fmt: skip
    """Follow each tree as long as a child is what the model would have said."""
    for request in range(len(candidates)):
        last, accepted = 0, 0
        accept_index[request, 0] = retrieve_index[request, 0]
        while True:
            wanted = int(target_predict[request, last])
            predicts[int(retrieve_index[request, last])] = wanted
            child = int(retrieve_next_token[request, last])
            while child >= 0 and int(candidates[request, child]) != wanted:
                child = int(retrieve_next_sibling[request, child])
            if child < 0:
                break
            accepted, last = accepted + 1, child
            accept_index[request, accepted] = retrieve_index[request, child]
        accept_token_num[request] = accepted
    return predicts, accept_index, accept_token_num


def build_chain(bonus, parents, scores, drafted, lengths, total, topk, steps, drafts, *_, **__):
    """What the tree kernel makes of drafts in chains: mask, positions, the three tables of links, tokens."""
    requests = len(lengths)
    assert topk == 1 and drafts == steps + 1
    links = torch.arange(1, drafts + 1).repeat(requests, 1)
    links[:, -1] = -1
    index = torch.arange(requests * drafts).view(requests, drafts)
    positions = (lengths[:, None] + torch.arange(drafts)).flatten()
    tokens = torch.cat([bonus[:, None].long(), drafted[:, :steps].long()], 1).flatten()
    return torch.ones(1, dtype=torch.bool), positions, index, links, torch.full_like(links, -1), tokens


def rows_of_slots(rows, table, begin, count):
    """int64 [requests * count]: the slots of each request from ``begin`` on."""
    return table[rows[:, None].long(), begin[:, None].long() + torch.arange(count)].flatten().long()


class Launched:
    """A Triton kernel by its name, that is launched as one."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return self._function


class DraftStep(PlainAttention):
    """One decode step of a draft model, a number of steps after the committed tokens."""

    def __init__(self, runner, number):
        super().__init__(runner)
        self._number = number

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        counts = [1] * len(forward_batch.seq_lens)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, counts, self._number + 1)


class DraftSteps:
    """The attention backends of a draft model's steps."""

    needs_cpu_seq_lens = True

    def __init__(self, runner, steps):
        self.attn_backends = [DraftStep(runner, number) for number in range(steps)]

    def init_forward_metadata(self, forward_batch):
        pass


def install(patch):
    """Put all of it in place of SGLang's kernels, as far as this release has them (``patch``: a ``MonkeyPatch``)."""
    kernels = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.speculative")
    kernels[1].reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask
    before = {kernel.__name__: sys.modules.get(kernel.__name__) for kernel in kernels}
    sys.modules.update({kernel.__name__: kernel for kernel in kernels})
    try:
        ngram = importlib.import_module("sglang.srt.speculative.ngram_worker")
        common = importlib.import_module("sglang.srt.speculative.eagle_worker_common")
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
    utils = importlib.import_module("sglang.srt.speculative.eagle_utils")
    memory = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    overlap = importlib.import_module("sglang.srt.managers.overlap_utils")
    allocation = importlib.import_module("sglang.srt.mem_cache.allocation")
    locations = importlib.import_module("sglang.kernels.ops.speculative.cache_locs")

    def extend(req_pool_indices, req_to_token, start_offset, draft_token_num, **_):
        return rows_of_slots(req_pool_indices, req_to_token, start_offset, draft_token_num)

    def draft(rows, table, lengths, out, topk, steps, **_):
        out.copy_(rows_of_slots(rows, table, lengths, topk * steps))

    def bonus(tokens, counts, out, stride, requests):
        out.copy_(tokens.view(requests, stride).gather(1, counts[:, None].long() - 1)[:, 0])

    def assign(rows, table, begins, ends, slots, requests):
        taken = 0
        for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
            table[row, begin:end] = slots[taken : taken + end - begin].to(table.dtype)
            taken += end - begin

    def last_slot(table, rows, lengths):
        return torch.where(lengths > 0, table[rows, lengths - 1], -1)

    def gather(rows, *buffers):
        return tuple(None if buffer is None else buffer[rows] for buffer in buffers)

    def stay(batch, accept_index, *_):
        own = torch.arange(len(accept_index))[:, None] * batch.spec_info.draft_token_num
        in_place = own + torch.arange(accept_index.shape[1])
        assert ((accept_index == in_place) | (accept_index < 0)).all(), "what was accepted is no chain"

    spec = importlib.import_module("sglang.srt.speculative.spec_utils")
    flags = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    drafts = importlib.import_module("sglang.srt.speculative.draft_utils")
    named = "stamps_children" in inspect.signature(drafts.DraftBackendFactory._create_backend).parameters

    def backend(made):
        return ("triton", made) if named else made

    def steps(factory):
        return backend(DraftSteps(factory.draft_model_runner, factory.speculative_num_steps - 1))

    def extension(factory):
        return backend(PlainAttention(factory.draft_model_runner))

    corpus = importlib.import_module("sglang.kernels.ops.speculative.ngram_corpus")
    patch.setattr(ngram, "USE_FULL_MASK", True)  # a backend that needs none turns it off
    for module, name, function in (
        # SGLang 0.5.17's n-grams do not include it themselves.
        (corpus, "load_jit", functools.partial(corpus.load_jit, extra_cflags=["-include", "cstddef"])),
        (
            spec,
            "_select_top_k_tokens_later",
            spec._select_top_k_tokens_later._torchdynamo_orig_callable,
        ),  # not compiled
        (torch.Tensor, "record_stream", lambda tensor, stream: None),  # a CPU's has no streams
        (flags, "_disable_overlap_schedule_for_cpu", lambda args: None),
        (drafts.DraftBackendFactory, "_create_triton_decode_backend", steps),
        (drafts.DraftBackendFactory, "_create_triton_prefill_backend", extension),
        (
            memory.MHATokenToKVPool,
            "_init_kv_copy_and_warmup",
            lambda pool: None,
        ),  # for moves, of which chains need none
        (overlap, "gather_spec_extras", gather),
        (allocation, "get_last_loc", last_slot),
        (allocation, "assign_req_to_token_pool_func", assign),
        (utils, "assign_req_to_token_pool_func", assign),
        (utils, "verify_tree_greedy_func", verify_tree_greedy),
        (ngram, "assign_extend_cache_locs_func", extend),
        (ngram, "move_accept_tokens_to_target_kvcache", stay),
        (locations, "assign_extend_cache_locs_uniform_func", extend),
        (common, "build_tree_kernel_efficient", build_chain),
        (common, "fill_bonus_tokens_func", bonus),
        (common, "assign_draft_cache_locs_contiguous", Launched(lambda *a: draft(*a[:4], *a[5:]))),
        (common, "assign_draft_cache_locs_contiguous_func", draft),
    ):
        if hasattr(module, name):
            patch.setattr(module, name, function)
