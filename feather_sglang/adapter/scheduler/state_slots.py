"""Slots for recurrent state, of which a server has few: a request that is not admitted holds none.

SGLang's admission loop gives each request that it looks up a slot to copy the cached state to, and takes it back from
whom its own budgets reject. A deferred request goes through that loop as an admitted one.
"""

from __future__ import annotations

from typing import Any


def give_back(req: Any, pool: Any) -> None:
    """Free the slot that a look-up gave a waiting request; ``pool`` is SGLang's of request rows."""
    owner = req.kv if hasattr(getattr(req, "kv", None), "mamba_pool_idx") else req  # since 0.5.19
    if getattr(owner, "mamba_pool_idx", None) is None or getattr(req, "session", None):
        return  # a session's slot outlives its turns
    owner.mamba_cow_src_index, owner.mamba_needs_clear = None, False
    pool.mamba_allocator.free(owner.mamba_pool_idx.unsqueeze(-1))
    owner.mamba_pool_idx = None
