"""Speculative decoding under pat: the tokens of a verify step, and the server settings that it requires.

pat packs the step in which the model itself verifies drafts (``TARGET_VERIFY``). The model that makes them stays with a
backend of SGLang's, unless pat is asked for it, too (`draft_model`). Drafts have to be chains, as those of
``--speculative-eagle-topk 1`` are; NGRAM's become chains here (`chain`), as its trie branches even where it is told not
to.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from feather_sglang.adapter.attention.beside import DRAFT, DRAFTS_BY_PAT
from feather_sglang.adapter.refusals import resolved
from feather_sglang.errors import FeatherError

logger = logging.getLogger(__name__)

NGRAM = "NGRAM"


def verified_drafts(server_args: Any, masks: bool) -> int:
    """Tokens of each request in the verify steps that come to pat; 0 where none do, which is said.

    ``masks`` tells whether some layers run on a backend that may read masks of drafts.
    """
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if spec.speculative_algorithm is None:
        return 0
    if spec.speculative_attention_mode != "decode":
        logger.warning(
            "feather: pat has nothing to do: with --speculative-attention-mode %s drafts are verified by the prefill "
            "backend; give --speculative-attention-mode decode",
            spec.speculative_attention_mode,
        )
        return 0
    drafts = int(spec.speculative_num_draft_tokens)
    if spec.speculative_algorithm == NGRAM:
        chain_ngrams()
        if not masks:
            _skip_masks()
        drafted = "as chains of n-grams"
    else:
        by_pat = "pat and " if getattr(server_args, DRAFTS_BY_PAT, False) else ""
        drafted = f"by {by_pat}{resolved(server_args, DRAFT)}"
    logger.info("feather: pat packs the verification of %d tokens a request; they are drafted %s", drafts, drafted)
    return drafts


def chain(tokens: npt.NDArray[Any], mask: npt.NDArray[Any], requests: int) -> tuple[npt.NDArray[Any], ...]:
    """Each request's tree of drafts as one chain: its longest path, and then whatever else the tree holds.

    Parameters
    ----------
    tokens : [requests * drafts]; the first of each request is its root.
    mask : [requests * drafts * drafts]; whether the second draft is the first one or before it on its path.
    """
    trees = mask.reshape(requests, -1, round((mask.size / requests) ** 0.5)).astype(bool)
    deepest = trees.sum(axis=2).argmax(axis=1)
    path = np.take_along_axis(trees, deepest[:, None, None], axis=1)[:, 0]
    order = np.argsort(~path, axis=1, kind="stable")
    chained = np.take_along_axis(tokens.reshape(path.shape), order, axis=1).reshape(tokens.shape)
    causal = np.broadcast_to(np.tril(np.ones(trees.shape[1:], bool)), trees.shape)
    return chained, np.ascontiguousarray(causal, mask.dtype).reshape(mask.shape)


def _skip_masks() -> None:
    """Spare SGLang a mask over each request's whole sequence at every step, of which pat reads nothing."""
    if (worker := sys.modules.get("sglang.srt.speculative.ngram_worker")) is not None:
        worker.USE_FULL_MASK = False  # type: ignore[attr-defined]


@functools.cache
def chain_ngrams() -> None:
    """Make chains of NGRAM's drafts, in this process."""
    try:
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
    except ImportError as error:
        raise FeatherError(f"the pat backend does not fit NGRAM here ({error}); drop --speculative-algorithm") from None
    original = NgramCorpus.batch_get

    @functools.wraps(original)
    def batch_get(corpus: Any, req_ids: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, mask = original(corpus, req_ids, *args, **kwargs)
        return chain(tokens, mask, len(req_ids))

    NgramCorpus.batch_get = batch_get
