"""Pinned memory on a CPU: there is none to pin, and ordinary memory does."""

from __future__ import annotations

import functools

import torch

_MAKERS = ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "arange")


def install(patch):
    """Let torch take every wish to pin memory for granted (``patch``: a ``MonkeyPatch``)."""
    for name in _MAKERS:
        patch.setattr(torch, name, _without_pinning(getattr(torch, name)))
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *args: tensor)


def _without_pinning(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made
