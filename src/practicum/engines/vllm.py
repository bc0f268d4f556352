"""vLLM as the student's engine, in this process or as a server.

Tokens go in, tokens and log-probabilities come out, with a seed for each completion.
"""

from practicum.engine_service.engine_settings import Config
from practicum.ports.engines import EngineModel, SamplingEngine


def build(config: Config, model: EngineModel) -> SamplingEngine:
    """Start the engine, or connect to the server. Raises EngineError."""
    # Imported on use: the first needs the package vllm, the second an HTTP client.
    if config.url is None:
        from practicum.engine_service.engine_process import open_process_engine

        return open_process_engine(config, model)
    from practicum.engine_service.service import open_service_engine

    return open_service_engine(config, model)
