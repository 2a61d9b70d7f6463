"""Reading the paths of requests in radix trees of all kinds, and in objects that are no tree."""

from types import SimpleNamespace

from feather_sglang.adapter.attention.packed_prefill import radix_paths
from feather_sglang.adapter.attention.packed_prefill.radix_paths import cached_paths


def node(parent, tokens):
    return SimpleNamespace(parent=parent, key=range(tokens))


def ends(paths):
    return [[end for _, end in path] for path in paths]


def requests(*nodes):
    return [SimpleNamespace(last_node=one) for one in nodes]


def test_nodes_are_followed_to_the_root():
    root = node(None, 0)
    upper = node(root, 7)
    one, other = node(upper, 3), node(upper, 5)
    paths = cached_paths(SimpleNamespace(), requests(one, other, upper, root, one))
    assert ends(paths) == [[7, 10], [7, 12], [7], [], [7, 10]]
    assert paths[0] == paths[4] and paths[0][0] == paths[1][0] == paths[2][0] and paths[0][1] != paths[1][1]


def test_who_has_no_node_shares_nothing():
    """Such as a streaming session's turn, a retracted request, a cache without a tree, and rows of beams."""
    assert ends(cached_paths(SimpleNamespace(), [*requests(object(), None), None])) == [[], [], []]


def test_a_tree_that_cannot_say_is_named_once(caplog):
    def resolve(node):
        raise NotImplementedError("not yet ported")

    radix_paths._say_unknown.cache_clear()
    for _ in range(2):
        assert cached_paths(SimpleNamespace(resolve_node_handle=resolve), requests(3, None)) == [[], []]
    assert [record.message for record in caplog.records if "CORE_BACKEND=python" in record.message] == [
        caplog.messages[0]
    ]


def test_a_tree_that_says_paths_itself_is_asked_once():
    asked = []

    def collect(nodes):
        asked.append(nodes)
        return [[SimpleNamespace(node_id=10 * one, path_end=one)] for one in nodes]

    tree = SimpleNamespace(tree_core=SimpleNamespace(collect_path_info=collect))
    assert cached_paths(tree, [*requests(4, object(), 2, 4), None]) == [[(40, 4)], [], [(20, 2)], [(40, 4)], []]
    assert asked == [[2, 4]]
