"""A server of one process that streams tokens at leisure, and writes its process id where FAKE_PID says."""

import asyncio
import json
import os
import sys
from pathlib import Path

PIECES, SECONDS = 4, 0.05


async def answer(reader, writer):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")), b": 0")
    body = await reader.readexactly(int(length.split(b": ")[1]))
    if head.split()[1] == b"/generate" and b'"stream": true' in body:
        tokens = json.loads(body)["sampling_params"]["max_new_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in range(1, PIECES + 1):
            count, reason = (tokens, {"type": "length"}) if piece == PIECES else (piece, None)
            meta = {"completion_tokens": count, "cached_tokens": 3, "finish_reason": reason}
            data = b"data: " + json.dumps({"output_ids": [], "meta_info": meta}).encode() + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(SECONDS)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        states = [{"effective_max_running_requests_per_dp": 500}]
        told = {"internal_states": states, "max_total_num_tokens": 10**6, "output_ids": [1]}
        content = json.dumps(told).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content))
    await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]), backlog=4096)
    Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
    await server.serve_forever()


asyncio.run(main())
