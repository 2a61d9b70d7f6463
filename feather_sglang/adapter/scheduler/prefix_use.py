"""How much of a prompt other requests can share: of some prompts SGLang caches only a part, or nothing.

If the logprobs of a prompt are asked for, SGLang computes it from there on, whatever is cached. A request with a fake
prefill server, with embeddings of its own, or in a streaming session that keeps its own cache leaves nothing to other
requests, so these must not wait for its prefix.
"""

from __future__ import annotations

from array import array
from typing import Any

from xxhash import xxh3_64_intdigest


def usable_tokens(req: Any, tokens: int) -> int:
    """Of so many tokens of a request, those at the beginning that may come from SGLang's prefix cache, and go there.

    What goes there and never comes from there is not counted: the tree cannot tell the two apart.
    """
    if getattr(req, "skip_radix_cache_insert", False) or req.positional_embed_overrides is not None:
        return 0
    session = req.session
    if session is not None and session.streaming:
        # Its first prompt is shared as any other, and logprobs of prompts are not given. The turns after that go on
        # from what the session keeps for itself.
        return 0 if session.req_nodes else tokens
    return int(req._compute_max_prefix_len(tokens))


def tokens_to_share(req: Any, chunk_size: int) -> Any:
    """Prompt of a request, and what it has generated, as it enters the tree: unlike any other from where it is alone.

    Less than a chunk is shared in any case: SGLang computes the last token of every prompt.
    """
    tokens = req.origin_input_ids
    if req.output_ids:
        tokens = array("q", tokens)
        tokens.extend(req.output_ids)
    usable = usable_tokens(req, len(tokens))
    if len(tokens) - usable <= chunk_size:
        return tokens
    tokens = array("q", tokens)
    # No token of a prompt, and alike on every rank.
    tokens[usable] = -1 - (xxh3_64_intdigest(repr(req.rid).encode()) >> 1)
    return tokens
