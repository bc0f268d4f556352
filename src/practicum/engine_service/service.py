"""vLLM behind a URL: its token routes, its routes for weights, and a folder for the weights.

The server is started with VLLM_SERVER_DEV_MODE=1, which opens the routes for weights, and with
`--enable-scale-out`, which opens the token route. See docs/engines.md.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.engine_service import engine_requests
from practicum.engine_service.engine_settings import Config
from practicum.errors import EngineError, RecipeError, TeacherError
from practicum.models.tensors import write_tensors
from practicum.ports.engines import EngineModel
from practicum.remote.http import JsonClient, JsonRequest, RequestRefused, Server
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest

GENERATE = "/inference/v1/generate"

BYTES_PER_TOKEN = 4096
"""The most bytes of an answer for one token: its number, and log-probabilities in several forms."""

START = (
    "start it as `VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model "
    "FOLDER --enable-scale-out --logprobs-mode processed_logprobs`"
)


def open_service_engine(config: Config, model: EngineModel) -> "ServiceEngine":
    """Connect to the server and check what it can do.

    Raises EngineError if it is not there or started without what is needed, and RecipeError if the
    folder cannot be written.
    """
    engine = ServiceEngine(config, model)
    engine.check_server()
    return engine


class ServiceEngine:
    """A server of vLLM; see `practicum.ports.engines.SamplingEngine`."""

    may_lose_weights = True

    def __init__(self, config: Config, model: EngineModel) -> None:
        assert config.url is not None and config.folder is not None, "the settings were checked"
        self._config = config
        self._model = model
        self._folder = Path(config.folder).expanduser()
        self._loads = 0
        self._http = JsonClient(
            Server(
                url=config.url,
                key=_read_key(config.api_key_env),
                allow_http=config.allow_http,
                concurrency=config.concurrency,
                retry_seconds=config.retry_seconds,
                seed=seed_of("http", config.url),
            )
        )
        self.name = "vllm"

    def check_server(self) -> None:
        """Read the server's version, and check that its routes are open and its scores right."""
        version = self._ask(JsonRequest("/version", name="the version"))
        self.name = f"vllm {_read_text(version, 'version')} at a server"
        self._ask(JsonRequest("/is_paused", name="the state of the weight routes"))
        # With top_k=1 the sampling distribution gives the most likely token probability 1.
        prompt = tuple(range(min(8, self._model.vocab_size, self._model.max_tokens - 1)))
        params = SamplingParams(max_new_tokens=1, top_k=1)
        settings = engine_requests.build_sampling_settings(SampleRequest(prompt, seed=0), params)
        body = {"token_ids": list(prompt), "sampling_params": settings}
        (choice,) = self._generate([body], 1, "a trial")
        if self._read_sample(choice, params).sampling_logprobs[0] < -engine_requests.MAX_LOGPROB:
            raise EngineError(
                f"{self._http.address}: the server returns log-probabilities before temperature, "
                f"top_p and top_k, and log-probabilities after them are needed; {START}"
            )

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights into the folder, let the server read them, and remove them."""
        self._loads += 1
        # A new name each time: the server may map the file of the last hand-over into its memory.
        folder = self._folder / f"weights-{os.getpid()}-{self._loads}"
        try:
            folder.mkdir(parents=True)
            write_tensors(folder / "model.safetensors", weights)
        except OSError as error:
            raise EngineError(
                f"rollout.engine.folder: {folder} cannot be written ({error.strerror}); name a "
                "folder with room for the student's weights"
            ) from error
        # Paused, so that no completion is decoded half by the old weights and half by the new, and
        # the keys and values of the old ones are forgotten: a prompt that the server has already
        # read would otherwise be continued from them.
        try:
            self._post("/pause?mode=wait&clear_cache=true", {}, "the pause before new weights")
            call = {
                "method": "reload_weights",
                "kwargs": {"weights_path": str(folder.resolve())},
                "timeout": self._config.timeout,
            }
            self._post("/collective_rpc", call, "the hand-over of weights")
            self._post("/resume", {}, "the end of the pause")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, many at once."""
        engine_requests.refuse_unsupported(params)
        bodies = [
            {
                "token_ids": list(request.prompt_tokens),
                "sampling_params": engine_requests.build_sampling_settings(request, params),
            }
            for request in requests
        ]
        choices = self._generate(bodies, params.max_new_tokens, "a completion")
        return [self._read_sample(choice, params) for choice in choices]

    def _read_sample(self, choice: Mapping[str, Any], params: SamplingParams) -> Sample:
        return engine_requests.read_sample(
            choice.get("token_ids"),
            _find_logprobs(choice),
            choice.get("finish_reason"),
            params,
            self._model.vocab_size,
        )

    def score(self, request: ScoreRequest) -> Float[Tensor, " T"]:
        """Return the log-probabilities of the request's tokens."""
        # The scores of a prompt are computed again; vLLM does not read them from its cache.
        tokens = [*request.prompt_tokens, *request.tokens]
        body = {"token_ids": tokens, "sampling_params": engine_requests.build_scoring_settings()}
        question = self._build_question(body, len(tokens), "the canary")
        answer = self._ask(question)
        rows = answer.get("prompt_logprobs") if isinstance(answer, Mapping) else None
        if not isinstance(rows, list) or len(rows) != len(tokens):
            raise self._build_garbage_error("the log-probabilities of a prompt")
        logprobs = [
            self._read_prompt_logprob(row, token)
            for row, token in zip(rows[1:], tokens[1:], strict=True)
        ]
        return engine_requests.read_scores(request, logprobs)

    def free_memory(self) -> bool:
        """Do nothing: the server's memory is not the trainer's."""
        return False

    def close(self) -> None:
        """Do nothing: the server keeps running."""

    def _generate(
        self, bodies: Sequence[Mapping[str, Any]], max_tokens: int, name: str
    ) -> list[Mapping[str, Any]]:
        """Return the only choice of each answer."""
        questions = [self._build_question(body, max_tokens, name) for body in bodies]
        choices = []
        for answer in self._ask_all(questions):
            parts = answer.get("choices") if isinstance(answer, Mapping) else None
            if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], Mapping):
                raise self._build_garbage_error("one choice")
            choices.append(parts[0])
        return choices

    def _build_question(self, body: Mapping[str, Any], tokens: int, name: str) -> JsonRequest:
        most_bytes = (1 << 16) + BYTES_PER_TOKEN * tokens
        return JsonRequest(GENERATE, body, name, self._config.timeout, most_bytes)

    def _post(self, path: str, body: Mapping[str, Any], name: str) -> None:
        self._ask(JsonRequest(path, body, name, self._config.timeout))

    def _ask(self, question: JsonRequest) -> Any:
        return self._ask_all([question])[0]

    def _ask_all(self, questions: Sequence[JsonRequest]) -> list[Any]:
        """Return the answers; raises EngineError, with how to start the server if a route is shut."""
        try:
            return self._http.send_all(questions)
        except RequestRefused as error:
            advice = f"; {START}" if error.status in (404, 405) else ""
            raise EngineError(f"rollout.engine: {error}{advice}") from error
        except TeacherError as error:
            raise EngineError(f"rollout.engine: {error}") from error

    def _read_prompt_logprob(self, row: Any, token: int) -> float:
        entry = row.get(str(token)) if isinstance(row, Mapping) else None
        logprob = entry.get("logprob") if isinstance(entry, Mapping) else None
        if not isinstance(logprob, int | float):
            raise self._build_garbage_error("the log-probability of each token of a prompt")
        return float(logprob)

    def _build_garbage_error(self, missing: str) -> EngineError:
        return EngineError(
            f"rollout.engine: {self._http.address}{GENERATE}: the answer lacks {missing}; check "
            "the address"
        )


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise RecipeError(
            f"rollout.engine.api_key_env: the environment variable {variable} holds no key; set it "
            "before the run"
        )
    return key


def _read_text(answer: Any, name: str) -> str:
    text = answer.get(name) if isinstance(answer, Mapping) else None
    return text if isinstance(text, str) and text.isprintable() else "of unknown version"


def _find_logprobs(choice: Mapping[str, Any]) -> list[Any]:
    """Return the log-probabilities of a completion's tokens, None for each that is missing."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    entries = content if isinstance(content, list) else []
    return [entry.get("logprob") if isinstance(entry, Mapping) else None for entry in entries]
