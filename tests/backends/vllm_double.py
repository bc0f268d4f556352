"""Two small doubles of vLLM, in process and as a server: they have its calls and routes, and sample as the local backend."""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import load
from practicum.backends.local.sampler import LocalSampler
from practicum.models.config import ModelConfig
from practicum.models.tensors import read_tensors
from practicum.objective import Sampled
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

VERSION = "0.32.0"


class Core:
    """A model that vLLM would hold. `keeps_head` simulates the fault of tied models: the head keeps its old weights."""

    def __init__(
        self, language_model: LanguageModel, *, keeps_head: bool = False, raw: bool = False
    ) -> None:
        self.language_model = language_model
        self.keeps_head = keeps_head
        self.raw = raw
        self.loads = 0
        self.lock = threading.RLock()
        model: Any = language_model.model
        if keeps_head:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    def reload_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights; a missing name is an error, as most are in vLLM."""
        given = dict(weights)
        with self.lock, torch.no_grad():
            self.loads += 1
            for name, parameter in self.language_model.model.named_parameters():
                if not (self.keeps_head and name == "lm_head.weight"):
                    parameter.copy_(given[name])

    def scramble(self) -> None:
        """Forget the weights, as a restarted server does."""
        with self.lock, torch.no_grad():
            for parameter in self.language_model.model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.5)

    def complete(self, prompt: Sequence[int], settings: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return tokens, log-probabilities, the stop reason, and the prompt's log-probabilities if requested."""
        assert settings["max_tokens"] >= 1 and settings["detokenize"] is False
        params = SamplingParams(
            settings["max_tokens"],
            settings["temperature"],
            settings.get("top_p", 1.0),
            settings.get("top_k", 0),
            frozenset(settings.get("stop_token_ids", ())),
        )
        sampler = LocalSampler(self.language_model)
        with self.lock:
            (sample,) = sampler.sample([SampleRequest(tuple(prompt), settings["seed"])], params)
            scores = None
            if settings.get("prompt_logprobs") is not None:
                request = ScoreRequest(tuple(prompt[:1]), tuple(prompt[1:]))
                (signal,) = sampler.score([request], Sampled())
                assert signal.logprobs is not None
                scores = signal.logprobs.tolist()
        is_tempered = not self.raw and params.temperature > 0
        logprobs = sample.sampling_logprobs if is_tempered else sample.policy_logprobs
        return sample.tokens.tolist(), logprobs.tolist(), sample.stop_reason, scores


def fake_package(**faults: bool) -> SimpleNamespace:
    """Return a replacement of the package `vllm`; `made` lists the started engines."""
    made: list[LLM] = []

    class LLM:
        def __init__(self, folder: str, **settings: Any) -> None:
            assert settings["load_format"] == "dummy" and settings["skip_tokenizer_init"]
            assert settings["logprobs_mode"] == "processed_logprobs"
            assert settings["max_model_len"] > 0 and settings["dtype"] == "float32"
            config = AutoConfig.from_pretrained(folder)
            assert config.architectures, "vLLM chooses the model's class by its name"
            with torch.random.fork_rng():
                torch.manual_seed(9)
                model = AutoModelForCausalLM.from_config(config)
            self.core = Core(LanguageModel(model.eval(), config.vocab_size), **faults)
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._end))
            self.ended = False
            made.append(self)

        def _end(self) -> None:
            self.ended = True

        def collective_rpc(self, method: str, kwargs: Mapping[str, Any]) -> list[None]:
            assert method == "reload_weights"
            self.core.reload_weights(kwargs["weights_iterator"])
            return [None]

        def reset_prefix_cache(self) -> bool:
            return True

        def generate(
            self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool
        ) -> list[Any]:
            assert use_tqdm is False
            return [
                _output(p["prompt_token_ids"], self.core.complete(p["prompt_token_ids"], vars(s)))
                for p, s in zip(prompts, params, strict=True)
            ]

    return SimpleNamespace(
        LLM=LLM,
        SamplingParams=lambda **settings: SimpleNamespace(**settings),
        __version__=VERSION,
        made=made,
    )


def _output(prompt: Sequence[int], completion: tuple[Any, ...]) -> Any:
    tokens, logprobs, reason, scores = completion
    rows = [
        {token: SimpleNamespace(logprob=value)}
        for token, value in zip(tokens, logprobs, strict=True)
    ]
    prompt_rows = None
    if scores is not None:
        prompt_rows = [
            None,
            *({t: SimpleNamespace(logprob=v)} for t, v in zip(prompt[1:], scores, strict=True)),
        ]
    one = SimpleNamespace(token_ids=tokens, logprobs=rows, finish_reason=reason)
    return SimpleNamespace(outputs=[one], prompt_logprobs=prompt_rows)


class VllmServer:
    """A server with the routes that `rollout.engine: {type: vllm, url: ...}` asks; `asked` lists the paths in order."""

    def __init__(self, folder: Path, *, scale_out: bool = True, **faults: bool) -> None:
        self.core = Core(load(ModelConfig(model=str(folder))).language_model, **faults)
        self.scale_out = scale_out
        self.paused = False
        self.asked: list[str] = []
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "VllmServer":
        owner = self

        class Bound(_Handler):
            double = owner

        self._server = _Server(("127.0.0.1", 0), Bound)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        self.asked.append(path)
        if path == "/version":
            return 200, {"version": VERSION}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return 200, {"status": "paused" if self.paused else "resumed"}
        if path == "/collective_rpc":
            assert self.paused and body["method"] == "reload_weights"
            read = read_tensors(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            self.core.reload_weights(read.items())
            return 200, {"results": [None]}
        if path == "/inference/v1/generate" and self.scale_out:
            assert not self.paused
            return 200, self._generate(body)
        return 404, {"detail": "Not Found"}

    def _generate(self, body: Any) -> Any:
        prompt = body["token_ids"]
        tokens, logprobs, reason, scores = self.core.complete(prompt, body["sampling_params"])
        content = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(tokens, logprobs, strict=True)
        ]
        rows = None
        if scores is not None:
            pairs = zip(prompt[1:], scores, strict=True)
            rows = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in pairs)]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": content} if "logprobs" in body["sampling_params"] else None,
            "finish_reason": reason,
        }
        return {"request_id": "x", "choices": [choice], "prompt_logprobs": rows}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class _Handler(BaseHTTPRequestHandler):
    double: VllmServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._reply(json.loads(self.rfile.read(length)))

    def _reply(self, body: Any) -> None:
        status, answer = self.double.answer(urlsplit(self.path).path, body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
