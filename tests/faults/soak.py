"""A real server on the CPU under all that requests do, for an hour: nothing is lost, and nothing stays behind.

    python3 dev.py soak [--requests 20000] [--aborts 0.3] [--policy feather] [--log FILE]

Requests share prefixes; some use LoRA adapters, some are turns of sessions, all have one of three priorities; some are
aborted or left by their clients at any time. After every step the server checks its tree against SGLang's queues. It
ends with status 1 where a request was lost or came back short, where the tree differed, where tokens stay in use, or
where the scheduler's memory has grown by more than 1% since a third of the requests had come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch
from safetensors.torch import save_file

from server import tiny_model
from server.sglang_server import SGLangServer

# SGLang pins memory for LoRA adapters, which a machine without a GPU cannot.
UNPINNED = (sys.executable, str(Path(__file__).with_name("unpinned_server.py")))
ADAPTERS, RANK = ("ada", "bea"), 4
IN_FLIGHT = 96
SECONDS = 300  # of a request that waits for all others
GROWTH = 0.01
PREFIXES = [[4 + group] * length for group, length in enumerate((120, 200, 300, 60, 150, 240))]


class Found(NamedTuple):
    """The observations of the clients."""

    complete: int
    aborted: int
    wrong: list[str]
    megabytes: list[float]  # of the scheduler, from time to time
    seconds: float


def write_adapter(folder: Path, seed: int) -> Path:
    """Random LoRA weights for the tiny model's attention."""
    folder.mkdir(parents=True)
    generator, weights = torch.Generator().manual_seed(seed), {}
    sizes = {"q_proj": tiny_model.HEADS * tiny_model.HEAD_DIM, "v_proj": tiny_model.KV_HEADS * tiny_model.HEAD_DIM}
    for layer in range(tiny_model.LAYERS):
        for name, size in sizes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(RANK, tiny_model.HIDDEN, generator=generator) * 0.1
            weights[f"{key}.lora_B.weight"] = torch.randn(size, RANK, generator=generator) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes), "lora_dropout": 0.0,
              "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Clients:
    """The clients of one server."""

    def __init__(self, server: SGLangServer, requests: int, aborts: float, seed: int, adapters: bool) -> None:
        self.server, self.requests, self.aborts, self.seed = server, requests, aborts, seed
        self.adapted = 0.25 if adapters else 0.0  # share of requests that use an adapter
        self.complete, self.aborted, self.wrong = 0, 0, []

    async def run(self) -> Found:
        begun, megabytes, gate = time.monotonic(), [], asyncio.Semaphore(IN_FLIGHT)
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as self.http:
            running: set[asyncio.Task[None]] = set()
            for number in range(self.requests):
                await gate.acquire()
                task = asyncio.create_task(self.one(number))
                running.add(task)
                task.add_done_callback(lambda done: (running.discard(done), gate.release()))
                if number % max(1, self.requests // 30) == 0:
                    megabytes.append(memory_of_scheduler(self.server))
            await asyncio.gather(*running)
        megabytes.append(memory_of_scheduler(self.server))
        return Found(self.complete, self.aborted, self.wrong, megabytes, time.monotonic() - begun)

    async def one(self, number: int) -> None:
        """A request, or a session of three."""
        rng = random.Random(f"{self.seed} {number}")
        try:
            if rng.random() < 0.05:
                await self.session(number, rng)
            else:
                await self.request(number, rng, rng.random() < self.aborts)
        except Exception as error:
            self.wrong.append(f"{number}: {type(error).__name__} {error}"[:300])

    def body(self, number: int, rng: random.Random, tail: int = 6) -> dict[str, Any]:
        tokens = rng.choice(PREFIXES) + [rng.randrange(4, 250) for _ in range(rng.randrange(1, tail))]
        sampling = {"max_new_tokens": rng.randrange(1, 24), "temperature": 0, "ignore_eos": True}
        adapter = {"lora_path": rng.choice(ADAPTERS)} if rng.random() < self.adapted else {}
        return {"rid": f"{self.seed}-{number:07}", "input_ids": tokens, "sampling_params": sampling,
                "priority": rng.choice((0, 5, 10)), **adapter}  # fmt: skip

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.http.post(self.server.url + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text[:1] in ("{", "[", '"') else text

    def check(self, number: int, body: dict[str, Any], status: int, answer: Any) -> None:
        wanted = body["sampling_params"]["max_new_tokens"]
        if status == 200 and answer["meta_info"]["completion_tokens"] == wanted:
            self.complete += 1
        else:
            self.wrong.append(f"{number}: {status} {answer}"[:300])

    async def request(self, number: int, rng: random.Random, leaves: bool) -> None:
        body = self.body(number, rng)
        if not leaves:
            return self.check(number, body, *await self.post("/generate", body))
        asked = asyncio.create_task(self.post("/generate", body))
        await asyncio.sleep(rng.choice((0.0, 0.02, 0.2, 0.6)))
        self.aborted += 1
        if rng.random() < 0.5:  # its client hangs up
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        else:
            await self.post("/abort_request", {"rid": body["rid"]})
            await asked  # it is told of the end, or got it before

    async def session(self, number: int, rng: random.Random) -> None:
        status, name = await self.post("/open_session", {"capacity_of_str_len": 4000})
        assert status == 200, f"open_session: {status} {name}"
        before = None
        for turn in range(3):
            body = self.body(number, rng) | {"rid": f"{self.seed}-{number:07}-{turn}"}
            body.pop("lora_path", None)
            body["session_params"] = {"id": name, "rid": before}
            status, answer = await self.post("/generate", body)
            self.check(number, body, status, answer)
            before = answer["meta_info"]["id"]
        status, _ = await self.post("/close_session", {"session_id": name})
        assert status == 200, f"close_session: {status}"


def memory_of_scheduler(server: SGLangServer) -> float:
    """Megabytes of the server's largest process that nobody else has: the scheduler's."""
    largest = 0.0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            group = int((status.parent / "stat").read_text().rpartition(")")[2].split()[2])
        except (OSError, ValueError):
            continue
        if group == server._process.pid and "RssAnon" in fields:
            largest = max(largest, int(fields["RssAnon"].split()[0]) / 1024)
    return largest


def problems_of(server: SGLangServer, found: Found) -> list[str]:
    """What is not as it has to be, a line each."""
    wrong = [*found.wrong[:10], *([f"{len(found.wrong)} requests in all"] if found.wrong else [])]
    try:
        server.wait_until_idle(60)
        server.post("/flush_cache", {})  # answers 400 if a request is left
        if (left := server.load()) != (0, 0, 0):
            wrong.append(f"(running, waiting, tokens) is {left} at the end")
    except AssertionError as error:
        wrong.append(str(error))
    text = server.text()
    for sign in ("Traceback", "goes on as fcfs", "AssertionError"):
        if sign in text:
            wrong.append(f"the server's log has {sign!r}")
    return wrong


def soak(
    folder: Path, log: Path, requests: int, aborts: float = 0.3, policy: str = "feather", seed: int = 0,
    start: Any = UNPINNED, adapters: bool = True,
) -> tuple[Found, list[str]]:  # fmt: skip
    """Start a server, let clients come and go, and look at what is left."""
    model = tiny_model.write_model(folder / "model")
    flags = ["--schedule-policy", policy]
    if adapters:
        paths = [f"{name}={write_adapter(folder / name, index)}" for index, name in enumerate(ADAPTERS)]
        flags += ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths", *paths]
    flags += ["--max-total-tokens", "6000", "--max-running-requests", "24", "--enable-priority-scheduling",
             "--chunked-prefill-size", "512", "--disable-overlap-schedule"]  # fmt: skip
    with SGLangServer(model, log, *flags, start=start, FEATHER_DEBUG_CHECK="1") as server:
        found = asyncio.run(Clients(server, requests, aborts, seed, adapters).run())
        return found, problems_of(server, found)


def grown(found: Found) -> float:
    """Share by which memory has grown since a third of the requests had come."""
    third = found.megabytes[len(found.megabytes) // 3]
    return max(found.megabytes[-3:]) / third - 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="(%(default)s)")
    parser.add_argument("--aborts", type=float, default=0.3, help="share that is aborted or left (%(default)s)")
    parser.add_argument("--policy", default="feather", help="(%(default)s)")
    parser.add_argument("--log", type=Path, help="keep the server's output in this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder, "server.txt")
        found, wrong = soak(Path(folder), log, options.requests, options.aborts, options.policy)
        more = grown(found)
        if more > GROWTH:
            wrong.append(f"the scheduler's memory grew by {more:.1%}")
        left, seconds = f"{found.aborted} aborted or left", f"{found.seconds:.0f} s"
        print(f"{found.complete} answers, {left}, {len(found.wrong)} wrong, {seconds}")
        sizes = ", ".join(f"{size:.0f}" for size in found.megabytes)
        print(f"memory of the scheduler: {sizes} MB; grown by {more:.2%}")
        for line in wrong:
            print(f"soak: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
