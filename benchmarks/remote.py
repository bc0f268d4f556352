"""Measure the cost of a remote teacher for this process: requests, JSON and checks, with a server that answers at once.

    python -m benchmarks remote [--completions 64] [--prompt 256] [--tokens 128] [--rounds 5]

The server is a separate process that replays one vLLM answer, so its work is not counted. Printed are this process's processor time
per scored token, and the bytes sent and received per scored token.
"""

import argparse
import asyncio
import json
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from time import monotonic, process_time

import torch
from transformers import PreTrainedTokenizerBase

from practicum.objective import Sampled, Signal, TopK
from practicum.ports import Capabilities
from practicum.remote.http import JsonClient, Server
from practicum.teaching.dialects import Vllm
from practicum.teaching.probe import Probe
from practicum.teaching.remote import RemoteClient, ServerGenerator, ServerLimits
from practicum.text import Renderer
from practicum.types import ScoreRequest

VOCABULARY = 50_000


def build_answer(ids: Sequence[int], k: int) -> bytes:
    """Return what vLLM answers about a text: k candidates a token and the token itself."""
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, object] | None] = [None]
    for token in ids[1:]:
        candidates = (
            {token, *torch.randint(0, VOCABULARY, (k,), generator=generator).tolist()}
            if k
            else {token}
        )
        rows.append(
            {
                str(number): {
                    "logprob": -4.0 - number / VOCABULARY,
                    "rank": 1,
                    "decoded_token": " word",
                }
                for number in candidates
            }
        )
    choice = {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "prompt_logprobs": rows,
    }
    return json.dumps({"id": "cmpl", "object": "text_completion", "choices": [choice]}).encode()


def serve(pipe: Connection, answers: dict[int, bytes]) -> None:
    """Answer every request with what belongs to its `prompt_logprobs`, on a port that is sent through the pipe."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            data = answers[body["prompt_logprobs"]]
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(data)
            )
            writer.write(data)
            await writer.drain()

    async def main() -> None:
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def main() -> None:
    """Measure sampled scores and twenty candidates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks remote", description=__doc__)
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ids = torch.randint(
        0,
        VOCABULARY,
        (options.prompt + options.tokens,),
        generator=torch.Generator().manual_seed(1),
    ).tolist()
    signals: dict[int, Signal] = {0: Sampled(), 20: TopK(k=20, support="teacher")}
    answers = {k: build_answer(ids, k) for k in signals}
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(sender, answers), daemon=True
    )
    process.start()
    http = JsonClient(Server(f"http://127.0.0.1:{receiver.recv()}"))
    requests = [
        ScoreRequest(tuple(ids[: options.prompt]), tuple(ids[options.prompt :]))
    ] * options.completions
    canary = torch.zeros(1)
    for k, signal in signals.items():
        speaker = ServerGenerator(
            http, "m", Renderer(PreTrainedTokenizerBase()), ServerLimits(canary_every=10**9)
        )
        probe = Probe("m", ("m",), Vllm(), canary=canary)
        client = RemoteClient(
            speaker, probe, Vllm(), Capabilities(frozenset({"sampled", "topk"})), VOCABULARY
        )
        walls, processors = [], []
        for _ in range(options.rounds):
            wall, processor = monotonic(), process_time()
            client.score(requests, signal)
            walls.append(monotonic() - wall)
            processors.append(process_time() - processor)
        tokens = options.completions * options.tokens
        print(
            f"{signal.name:8} k={k:<3} {1e6 * sorted(processors)[len(processors) // 2] / tokens:7.1f} us of processor per token   "
            f"{1e3 * sorted(walls)[len(walls) // 2]:7.0f} ms per call of {options.completions}   "
            f"{len(answers[k]) / options.tokens:7.0f} bytes per token"
        )
    process.terminate()


if __name__ == "__main__":
    main()
