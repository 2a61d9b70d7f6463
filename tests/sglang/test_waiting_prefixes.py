"""Waiting requests under a feather policy: prefixes are kept and loads reported as under SGLang's own policies."""

import pytest
from harness import Server
from sglang.srt.managers.schedule_policy import CacheAwarePolicy

from feather_sglang.adapter.scheduler import waiting_prefixes

OLDER, NEWER = [7] * 128, [8] * 128


@pytest.fixture
def server(tmp_path):
    """With two prefixes in the cache, ``OLDER`` used before ``NEWER``."""
    made = []

    def make(policy="feather", **overrides):
        one = Server(tmp_path, policy, **overrides)
        made.append(one)
        for rid, prefix in (("older", OLDER), ("newer", NEWER)):
            assert one.submit(rid, [*prefix, 9, 9], max_new_tokens=2)
            one.drain()
        return one

    yield make
    for one in made:
        one.close()


def wait_with(one, prefix, monkeypatch, rounds=3):
    """A request with that prefix that a few rounds do not admit."""
    monkeypatch.setattr(one.feather.admission, "propose", lambda batch: None)
    assert one.submit("waits", [*prefix, *range(40, 60)])
    for _ in range(rounds):
        one.step()
    assert [req.rid for req in one.scheduler.waiting_queue] == ["waits"] and not one.feather.failed
    return one.requests["waits"]


def evict(one, tokens):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    one.scheduler.tree_cache.evict(EvictParams(num_tokens=tokens))


def cached(one, prefix):
    """Tokens of a prefix in the cache."""
    assert one.submit("asks", [*prefix, 11])
    req = one.requests.pop("asks")
    one.scheduler.policy._compute_prefix_matches([req], CacheAwarePolicy.LPM)
    one.abort("asks")
    return req.num_matched_prefix_tokens


@pytest.mark.parametrize("core", ["python", "default"])
def test_a_prefix_that_somebody_waits_with_is_evicted_last(server, monkeypatch, core):
    if core == "python":
        monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    one = server()
    if not hasattr(one.scheduler.policy, "_touch_waiting_prefixes"):
        pytest.skip("this SGLang does not use the prefixes of those who wait")
    wait_with(one, OLDER, monkeypatch, rounds=waiting_prefixes.EVERY_ROUNDS + 1)
    evict(one, 100)
    assert cached(one, OLDER) == 128 and cached(one, NEWER) < 64


def test_without_anybody_waiting_the_older_is_evicted(server):
    one = server()
    evict(one, 100)
    assert cached(one, OLDER) < 64 and cached(one, NEWER) == 128


def test_a_load_report_counts_what_is_not_cached(server, monkeypatch):
    one = server()
    if not hasattr(one.scheduler.policy, "waiting_queue_prefix_matched"):
        pytest.skip("this SGLang's report counts what was found when a request came")
    req = wait_with(one, OLDER, monkeypatch)
    told = one.scheduler.load_inquirer.get_num_waiting_uncached_tokens()
    assert req.seqlen == 148
    # The tree knows whole chunks, and what the cache held when the request came.
    assert 20 <= told <= 20 + one.feather.admission.tree.chunk_size


def test_a_load_report_under_a_policy_that_has_failed_is_sglangs(server, monkeypatch):
    one = server()
    if not hasattr(one.scheduler.policy, "waiting_queue_prefix_matched"):
        pytest.skip("this SGLang's report counts what was found when a request came")
    wait_with(one, OLDER, monkeypatch)
    expected = type(one.scheduler.policy).waiting_queue_prefix_matched(one.scheduler.policy, [])
    one.feather.guard.fail("a test", RuntimeError("on purpose"))
    assert one.scheduler.policy.waiting_queue_prefix_matched([]) == expected
