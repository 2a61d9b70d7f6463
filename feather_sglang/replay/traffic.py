"""Workloads shaped like today's traffic: chats, agents, samples of one prompt, few-shot evaluation.

Shapes are from what is published; each generator says where. Lengths are log-normal, as in the public traces, in whole
blocks, so that a further turn's prompt agrees with the one before exactly as far as that went.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np

from feather_sglang.replay.traces import Trace, TraceRequest
from feather_sglang.replay.workloads import check_within, generator, poisson, shared_prefix

BLOCK = 64  # tokens
LONGEST_CONTEXT = 32_768  # tokens; a conversation that would go beyond ends before
SPREAD = 0.8  # standard deviation of the logarithm of a length
LARGEST = 6  # times the mean: longer ones are cut


def chat(sessions: int = 200, rate: float = 2.0, think_s: float = 60.0, seed: int = 0) -> Trace:
    """People who chat, and read each answer before they go on.

    2.5 turns of 300 and 440 tokens (WildChat, arXiv 2405.01470, table 1), a system prompt that all share, and a minute
    between an answer and the next question: 440 tokens are 330 words, of which people read 240 a minute.
    """
    return _sessions("chat", sessions, rate, 1, 1024, 2.5, 300, 440, think_s, seed)


def agents(sessions: int = 60, rate: float = 0.5, think_s: float = 2.0, seed: int = 0) -> Trace:
    """Agents that call a tool and go on with all they have seen: contexts that grow step by step.

    Prompts of 8,600 and answers of 180 tokens in the mean, as in Mooncake's trace of tools and agents (FAST'25, table
    1): four kinds of agents with instructions of 2,500 tokens, six steps, 1,000 tokens that a tool returns in 2 s.
    """
    return _sessions("agents", sessions, rate, 4, 2560, 6.0, 1000, 180, think_s, seed)


def samples(prompts: int = 32, each: int = 16, output_tokens: int = 500, seed: int = 0) -> Trace:
    """The rollouts of a training step: several samples of each prompt, all at once.

    16 samples of a prompt, as DAPO takes (arXiv 2503.14476); prompts of 300 tokens; outputs of very different lengths.
    """
    check_within("prompts", prompts, 1)
    check_within("each", each, 1)
    draw = generator(seed)
    fresh = count()
    paths = [tuple(next(fresh) for _ in range(blocks)) for blocks in _blocks(draw, 300, prompts)]
    outputs = _blocks(draw, output_tokens, prompts * each) * BLOCK
    made = [
        TraceRequest(i, 0.0, len(paths[i // each]) * BLOCK, int(output), paths[i // each])
        for i, output in enumerate(outputs)
    ]
    return Trace(f"{each} samples of {prompts} prompts", BLOCK, made)


def few_shot(tasks: int = 57, requests: int = 1000, rate: float = 200.0, seed: int = 0) -> Trace:
    """An evaluation with examples before each question: many tasks, short answers, as fast as they are taken.

    MMLU's 57 subjects (arXiv 2009.03300) with five examples, 700 tokens; a question has 100, its answer is one word.
    """
    trace = shared_prefix(tasks, 700, 100, output_tokens=4, rate=rate, requests=requests, seed=seed, jitter=0.5)
    return Trace(f"few-shot, {tasks} tasks", trace.block_size, trace.requests)


TRAFFIC: dict[str, Callable[..., Trace]] = {
    "chat": chat,
    "agents": agents,
    "samples": samples,
    "few-shot": few_shot,
}


def _sessions(
    name: str,
    sessions: int,
    rate: float,
    systems: int,
    system_tokens: int,
    turns: float,
    message_tokens: int,
    answer_tokens: int,
    think_s: float,
    seed: int,
) -> Trace:
    """Conversations that open with one of the system prompts.

    Parameters
    ----------
    rate : conversations that begin a second.
    turns : of a conversation, in the mean (geometric); at least one.
    message_tokens, answer_tokens : of a turn, in the mean.
    think_s : from an answer to the next message, in the mean (exponential).
    """
    check_within("sessions", sessions, 1)
    draw = generator(seed)
    begins = poisson(draw, rate, sessions)
    fresh = count()
    openings = [[next(fresh) for _ in range(-(-system_tokens // BLOCK))] for _ in range(systems)]
    made: list[TraceRequest] = []
    for begin in begins:
        path = list(openings[draw.integers(systems)])
        arrival, think, before = begin, 0.0, None
        length = int(draw.geometric(1 / turns))
        messages, answers = _blocks(draw, message_tokens, length), _blocks(draw, answer_tokens, length)
        for message, answer in zip(messages, answers, strict=True):
            path += [next(fresh) for _ in range(message)]
            if (len(path) + answer) * BLOCK > LONGEST_CONTEXT:
                break
            tokens = len(path) * BLOCK
            made.append(TraceRequest(len(made), arrival, tokens, int(answer) * BLOCK, tuple(path), before, think))
            before, think = len(made) - 1, round(float(draw.exponential(think_s)), 6)
            arrival = round(arrival + think, 6)
            path += [next(fresh) for _ in range(answer)]
    return Trace(name, BLOCK, _in_order(made))


def _in_order(made: list[TraceRequest]) -> list[TraceRequest]:
    """Sort by arrival; ids and the turns that they name follow."""
    order = sorted(made, key=lambda request: request.arrival_s)
    place = {request.request_id: place for place, request in enumerate(order)}
    return [
        request._replace(
            request_id=place[request.request_id], after=None if request.after is None else place[request.after]
        )
        for request in order
    ]


def _blocks(draw: np.random.Generator, mean: int, size: int) -> np.ndarray:
    """Lengths in blocks, at least one, that are `mean` tokens in the mean."""
    lengths = draw.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, size=size)
    return np.maximum(np.rint(np.minimum(lengths, LARGEST * mean) / BLOCK), 1).astype(int)
