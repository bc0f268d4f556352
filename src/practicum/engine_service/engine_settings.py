"""Settings of vLLM as the student's engine, for both of its places."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from practicum.types import FrozenConfig

SERVER_KEYS = ("folder", "allow_http", "api_key_env", "concurrency", "timeout", "retry_seconds")
"""The settings of a server only."""

PROCESS_KEYS = ("memory", "sleep")
"""The settings of an engine in this process only."""


class Config(FrozenConfig):
    """The place of the engine, and its limits."""

    not_compared: ClassVar[frozenset[str]] = frozenset(
        {*SERVER_KEYS, *PROCESS_KEYS, "url", "tolerance"}
    )
    """Settings that may change when a run is resumed; the engine's name records the place."""
    may_decline: ClassVar[bool] = False
    """False: a backend that would sample itself is refused."""
    may_sample: ClassVar[bool] = True
    type: Literal["vllm"] = "vllm"
    url: str | None = Field(
        default=None, description="a server's address; none: vLLM in this process"
    )
    folder: str | None = Field(
        default=None,
        description="with url: a folder that the server can read, for the weights; best in memory, "
        "such as /dev/shm/student",
    )
    allow_http: bool = Field(
        default=False,
        description="plain http to other machines, which everyone on the way can read",
    )
    api_key_env: str | None = Field(
        default=None, description="the environment variable that holds the server's key"
    )
    concurrency: int = Field(default=256, ge=1, le=4096, description="requests at once")
    timeout: float = Field(
        default=600.0, gt=0, description="seconds for a completion, or for a hand-over of weights"
    )
    retry_seconds: float = Field(
        default=120.0, ge=0, description="seconds during which a failing request is retried"
    )
    memory: float = Field(
        default=0.4, gt=0, lt=1, description="share of the GPU's memory for vLLM in this process"
    )
    sleep: bool = Field(
        default=False, description="free vLLM's memory on the GPU while the student trains"
    )
    tolerance: float | None = Field(
        default=None,
        gt=0,
        description="nats by which a log-probability may differ from the trainer's after weights "
        "were handed over; none: 0.01 in float32, 0.3 in 16 bits",
    )

    @model_validator(mode="after")
    def _check_place(self) -> "Config":
        unused = PROCESS_KEYS if self.url is not None else SERVER_KEYS
        where = "this process" if self.url is not None else "a server"
        settings = self.model_dump()
        for key in sorted(self.model_fields_set.intersection(unused)):
            if settings[key] != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for vLLM in {where}; leave it out, or change url")
        if self.url is not None and self.folder is None:
            raise ValueError(
                "a server reads the weights from a folder; set folder: a path that this machine "
                "writes and the server reads, such as /dev/shm/student"
            )
        return self

    def problems(self, mixes_tokens: bool, staleness: int) -> list[str]:
        """List what the engine cannot do for a recipe, each with what to write instead."""
        problems = []
        if mixes_tokens:
            problems.append(
                "rollout.engine: 'vllm' decodes whole completions, and rollout.source decodes "
                "token by token with the teacher; set source: mix(other=teacher), or leave "
                "engine out"
            )
        if self.sleep and staleness:
            problems.append(
                "rollout.engine.sleep: with rollout.max_staleness the engine samples while the "
                "student trains; leave sleep out, or write max_staleness: 0"
            )
        return problems

    def list_pool_problems(self, processes: int) -> list[str]:
        """List why processes that only sample cannot have an engine each, as `problems` does."""
        problems = []
        if self.url is not None and processes > 1:
            problems.append(
                f"rollout.engine.url: a server has the weights of one process, and {processes} "
                "sample; set backend.samplers: 1, or leave url out for an engine in each"
            )
        if self.sleep:
            problems.append(
                "rollout.engine.sleep: a sampler of backend 'ray' has its GPU for itself; leave "
                "sleep out"
            )
        return problems
