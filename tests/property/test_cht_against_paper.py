"""The Chunked Hash Tree and the paper's own formulation, driven through the same random histories."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from effort import samples
from feather_sglang.scheduling.tree.cht import ChunkedHashTree
from oracles.paper_cht import PaperTree

# Two tokens and a few shared stems give prefixes of several levels, duplicates and empty prompts in every history.
STEMS = ([], [0] * 4, [0] * 8, [0] * 8 + [1] * 4, [1] * 6)
prompts = st.builds(lambda stem, tail: stem + tail, st.sampled_from(STEMS), st.lists(st.integers(0, 1), max_size=5))


class TreeAgainstPaper(RuleBasedStateMachine):
    @initialize(chunk_size=st.integers(1, 5))
    def start(self, chunk_size):
        self.tree, self.paper = ChunkedHashTree(chunk_size), PaperTree(chunk_size)
        self.made = 0

    def both(self, operation, *arguments):
        getattr(self.tree, operation)(*arguments)
        getattr(self.paper, operation)(*arguments)

    @rule(prompt=prompts, extra_key=st.sampled_from([None, None, None, "lora"]), priority=st.sampled_from([0, 0, 0, 1]))
    def insert(self, prompt, extra_key, priority):
        self.both("insert", self.made, prompt, extra_key, priority)
        self.made += 1

    @precondition(lambda self: self.paper.waiting_requests - self.paper.deferred)
    @rule()
    def add_best(self):
        self.both("add_to_batch", self.tree.find_best().request_id)

    @precondition(lambda self: self.paper.waiting_requests)
    @rule(data=st.data(), operation=st.sampled_from(["add_to_batch", "hold"]))
    def change_waiting(self, data, operation):
        self.both(operation, data.draw(st.sampled_from(sorted(self.paper.waiting_requests))))

    @precondition(lambda self: self.paper.active)
    @rule(data=st.data())
    def finish(self, data):
        self.both("finish", data.draw(st.sampled_from(sorted(self.paper.active))))

    @precondition(lambda self: self.paper.waiting_requests | self.paper.held)
    @rule(data=st.data())
    def remove(self, data):
        self.both("remove", data.draw(st.sampled_from(sorted(self.paper.waiting_requests | self.paper.held))))

    @precondition(lambda self: self.paper.active | self.paper.held)
    @rule(data=st.data(), tokens=st.none() | prompts)
    def requeue(self, data, tokens):
        self.both("requeue", data.draw(st.sampled_from(sorted(self.paper.active | self.paper.held))), tokens)

    @precondition(lambda self: self.paper.active | self.paper.waiting_requests)
    @rule(data=st.data(), depth=st.integers(1, 6))
    def defer(self, data, depth):
        self.both("defer", data.draw(st.sampled_from(sorted(self.paper.active | self.paper.waiting_requests))), depth)

    @rule()
    def resume(self):
        self.both("resume")

    @invariant()
    def same_state(self):
        if not hasattr(self, "tree"):
            return
        tree, paper = self.tree, self.paper
        tree.check_invariants()
        assert tree.find_best() == paper.find_best()
        assert (tree.waiting, tree.active, tree.held) == (paper.waiting_requests, paper.active, paper.held)
        assert tree.tip == paper.tip
        assert tree.deferred == len(paper.deferred & paper.waiting_requests)
        assert tree.oldest() == paper.oldest()
        assert len(tree) == len(paper.request_hashes)
        assert tree.distinct_chunks == paper.distinct_chunks
        for request in paper.request_hashes:
            assert request in tree
            assert tree.missing_count(request) == paper.missing_count(request)
            for depth in range(1, 7):
                assert tree.sharing(request, depth) == paper.sharing(request, depth)
        for request in paper.waiting_requests:
            assert tree.candidate(request) == paper.candidate(request)

    @invariant()
    def best_in_branch_is_the_best_of_those_who_lose_nothing(self):
        if not hasattr(self, "tree"):
            return
        tree, paper = self.tree, self.paper
        loss = {request: tree.branch_loss(request) for request in paper.waiting_requests}
        if any(loss.values()):  # a main branch exists, and somebody waits outside it
            inside = [request for request in loss if not loss[request] and request not in paper.deferred]
            best = min(inside, key=lambda r: (paper.priority[r], paper.miss[r], paper.age[r]), default=None)
            assert tree.best_in_branch() == (None if best is None else paper.candidate(best))

    @invariant()
    def the_row_order_brings_every_shared_prefix_together(self):
        if not hasattr(self, "tree"):
            return
        requests = list(self.paper.request_hashes)
        order = self.tree.row_order(requests)
        assert (order is None) == self.stand_together(requests)
        assert order is None or sorted(order) == list(range(len(requests)))
        assert order is None or self.stand_together([requests[row] for row in order])

    def stand_together(self, requests):
        closed, open_chunks = set(), set()
        for chunks in (set(self.paper.request_hashes[request]) for request in requests):
            closed |= open_chunks - chunks
            open_chunks = chunks
            if closed & chunks:
                return False
        return True


TreeAgainstPaper.TestCase.settings = settings(max_examples=samples(150, 50), stateful_step_count=40, deadline=None)
TestTreeAgainstPaper = TreeAgainstPaper.TestCase
