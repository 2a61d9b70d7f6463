"""The Chunked Hash Tree as the paper writes it (appendix A, algorithms 1 and 3 to 6): the oracle of the product's tree.

Every change of the working set touches every waiting request that shares the hash, O(C * W_h * log W); simple and
slow. A "hash" is the tuple of the tokens itself, so the oracle cannot collide and shares no hashing with the product.

Where the pseudocode contradicts the prose, the prose is followed:

- algorithm 5, line 10, increments the missing counts; a chunk that enters the working set *decrements* them;
- algorithm 5, line 3, returns for the first active request before its chunks reach the working set and the
  reference counts; here it does not return;
- algorithm 5, line 15, finds the chunks that the request itself has just added; here the tip is looked for before;
- algorithm 4, line 7, skips when the set `active` is not empty; meant is a request that is active;
- algorithm 6 returns at lines 13 and 17 before it cleans up (line 27); here it always cleans up.

A serving system adds what the paper leaves out: `requeue`, `hold`, `defer`, `sharing`, `distinct_chunks`, priorities,
`extra_key`, ties by age.
"""

import heapq


class PaperTree:
    """Same operations and results as ``feather_sglang.scheduling.tree.cht.ChunkedHashTree``, as plain tuples."""

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size
        self.request_hashes, self.extra_keys, self.priority, self.age = {}, {}, {}, {}
        self.waiting_requests, self.active, self.held, self.deferred = set(), set(), set(), set()
        self.waiting = {}  # hash -> waiting requests that contain it
        self.working_set, self.ref, self.miss = set(), {}, {}
        self.waiting_heap = []
        self.tip = 0
        self.clock = 0

    def compute_hashes(self, tokens, extra_key):  # algorithm 1
        tokens = tuple(tokens)
        ends = [*range(self.chunk_size, len(tokens), self.chunk_size), len(tokens)] if tokens else []
        return [(level, extra_key, tokens[:end]) for level, end in enumerate(ends, 1)]

    def insert(self, request, tokens, extra_key=None, priority=0):  # algorithm 3
        self.request_hashes[request] = self.compute_hashes(tokens, extra_key)
        self.extra_keys[request], self.priority[request], self.age[request] = extra_key, priority, self.clock
        self.clock += 1
        self.resume()
        self._enter_queue(request)

    def find_best(self):  # algorithm 4
        if self.deferred:
            ranked = self.waiting_requests - self.deferred
            best = min(ranked, key=lambda r: (self.priority[r], self.miss[r], self.age[r]), default=None)
            return None if best is None else self.candidate(best)
        while self.waiting_heap:
            _, missing, _, request = self.waiting_heap[0]
            if request in self.waiting_requests and self.miss[request] == missing:
                return self.candidate(request)
            heapq.heappop(self.waiting_heap)
        return None

    def candidate(self, request):
        hashes = self.request_hashes[request]
        after = self._shared_depth(hashes)
        others = self.waiting_requests - {request}
        peers = sum(self.request_hashes[other][:after] == hashes[:after] for other in others)
        return request, self.miss[request], self.tip, after, peers

    def add_to_batch(self, request):  # algorithm 5
        hashes = self.request_hashes[request]
        self._leave_queue(request)
        self.tip = self._shared_depth(hashes) if self.active else len(hashes)
        self.active.add(request)
        for chunk in reversed(hashes):
            if self.ref.get(chunk, 0) == 0:
                self.working_set.add(chunk)
                self._change_missing(chunk, -1)
            self.ref[chunk] = self.ref.get(chunk, 0) + 1

    def finish(self, request):  # algorithm 6
        self.resume()
        self._leave_batch(request)
        self._forget(request)

    def remove(self, request):
        self.resume()
        if request in self.waiting_requests:
            self._leave_queue(request)
        self.held.discard(request)
        self._forget(request)

    def hold(self, request):
        self._leave_queue(request)
        self.held.add(request)

    def defer(self, request, depth):
        alike = self._sharers(request, depth)
        if len(alike) > 1:  # one alone shares with nobody
            self.deferred |= alike & self.waiting_requests

    def resume(self):
        self.deferred = set()

    def requeue(self, request, tokens=None):
        self.resume()
        if request in self.active:
            self._leave_batch(request)
        self.held.discard(request)
        if tokens is not None:
            self.request_hashes[request] = self.compute_hashes(tokens, self.extra_keys[request])
        self._enter_queue(request)

    def missing_count(self, request):
        return sum(chunk not in self.working_set for chunk in self.request_hashes[request])

    def sharing(self, request, depth):
        return len(({request} | self._sharers(request, depth)) & self.waiting_requests)

    @property
    def distinct_chunks(self):
        return len({chunk for hashes in self.request_hashes.values() for chunk in hashes})

    def oldest(self):
        return min(self.waiting_requests, key=self.age.get, default=None)

    def _sharers(self, request, depth):
        """All requests that share a request's first `depth` chunks; nobody where it has fewer."""
        stem = self.request_hashes[request][:depth]
        return {other for other, hashes in self.request_hashes.items() if len(stem) == depth and hashes[:depth] == stem}

    def _shared_depth(self, hashes):
        """The deepest level, not below the tip, at which the request agrees with the active ones."""
        levels = range(min(self.tip, len(hashes)), 0, -1)
        return next((level for level in levels if hashes[level - 1] in self.working_set), 0)

    def _push(self, request):
        entry = (self.priority[request], self.miss[request], self.age[request], request)
        heapq.heappush(self.waiting_heap, entry)

    def _change_missing(self, chunk, change):
        for request in self.waiting.get(chunk, ()):
            self.miss[request] += change
            self._push(request)

    def _enter_queue(self, request):
        self.waiting_requests.add(request)
        for chunk in self.request_hashes[request]:
            self.waiting.setdefault(chunk, set()).add(request)
        self.miss[request] = self.missing_count(request)
        self._push(request)

    def _leave_queue(self, request):
        self.waiting_requests.remove(request)
        for chunk in self.request_hashes[request]:
            self.waiting[chunk].remove(request)
        del self.miss[request]

    def _leave_batch(self, request):
        self.active.remove(request)
        for chunk in self.request_hashes[request]:
            self.ref[chunk] -= 1
            if self.ref[chunk] == 0:
                self.working_set.remove(chunk)
                self._change_missing(chunk, 1)
        if not self.active:
            self.tip = 0
            return
        remaining = [self.request_hashes[other] for other in self.active]
        while self.tip < min(map(len, remaining)) and self.ref[remaining[0][self.tip]] == len(self.active):
            self.tip += 1

    def _forget(self, request):
        for table in (self.request_hashes, self.extra_keys, self.priority, self.age):
            del table[request]
