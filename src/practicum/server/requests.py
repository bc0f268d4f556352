"""Define the JSON bodies as strict models: unknown fields are refused, not ignored."""

import json
from datetime import datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from practicum.server.refusals import HttpRefusal

MAX_SAMPLES = 1024
MAX_CANDIDATES = 1024
MAX_STOPS, MAX_STOP_LENGTH = 1024, 1024
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
MIN_TOP_P = 1e-6
"""The settings of sampling with which all probabilities are numbers in float32."""

MAX_DESCRIPTION = 2**14
"""The most bytes of JSON that describe a session, a model or a checkpoint."""

MAX_MODEL_NUMBER = 10**9 - 1
"""The largest number of a client's model: nine digits in the name of its run."""

T = TypeVar("T")
Name = Annotated[str, Field(max_length=300)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""An entry of an int64 tensor."""

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A client's own number; copies of a sampling client in other processes count up to 1e18."""

Lifetime = Annotated[int, Field(ge=3600, le=10 * 365 * 86400)]
"""The seconds until a checkpoint is removed: an hour to ten years, as in the Tinker API."""


def _check_temperature(temperature: float) -> float:
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"must be 0, or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; "
            "set 0 to take the most likely token"
        )
    return temperature


def _check_description(*parts: object) -> None:
    """Raise ValueError if the parts are larger than `MAX_DESCRIPTION` as JSON."""
    if sum(len(json.dumps(part)) for part in parts) > MAX_DESCRIPTION:
        raise ValueError(
            f"a description may have {MAX_DESCRIPTION // 1024} KiB of JSON; shorten the texts"
        )


def _check_metadata(metadata: T) -> T:
    _check_description(metadata)
    return metadata


Metadata = Annotated[dict[str, Any] | None, AfterValidator(_check_metadata)]
TextMetadata = Annotated[dict[str, str] | None, AfterValidator(_check_metadata)]
ModelNumber = Annotated[int, Field(ge=0, le=MAX_MODEL_NUMBER)]
StopText = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
StopTokens = Annotated[list[int], Field(max_length=MAX_STOPS)]

STABLE = "stable_reinforce"
NOT_STABLE = (
    f"loss_fn {STABLE} and its record_stability_info are not computed here, for the loss's "
    "definition is not public; set loss_fn=importance_sampling, ppo, cispo or gspo"
)


class Body(BaseModel):
    """The fields of every body; `type` repeats the name of the request or the kind of a part."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False
    )
    type: str | None = None


class ClientConfig(Body):
    """`client/config`."""

    sdk_version: Name


class CreateSession(Body):
    """`create_session`."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Name = ""
    project_id: str | None = None
    display_name: str | None = None

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        _check_description(self.tags, self.user_metadata, self.project_id, self.display_name)
        return self


class OfSession(Body):
    """`session_heartbeat`."""

    session_id: Name


class AdapterSettings(Body):
    """The rank of the adapters and the modules that get adapters.

    Adapters of the unembedding are not supported, even with `train_unembed`.
    """

    rank: int = Field(ge=1, le=1024)
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The optimizer of a training model."""

    type: Annotated[str | None, Field(pattern="^adamw$")] = "adamw"


class CreateModel(Body):
    """`create_model`."""

    session_id: Name
    model_seq_id: ModelNumber
    base_model: Name
    user_metadata: Metadata = None
    lora_config: AdapterSettings | None = None
    optimizer_config: Optimizer = Optimizer()


class LoadWeights(Body):
    """`load_weights`: into an existing model, or as the first request of a new one."""

    model_id: Name | None = None
    seq_id: Count | None = None
    session_id: Name | None = None
    model_seq_id: ModelNumber | None = None
    base_model: Name | None = None
    user_metadata: Metadata = None
    path: Name
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None


class OfModel(Body):
    """`get_info`, `unload_model`."""

    model_id: Name


class Adam(Body):
    """The settings of one optimizer step."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """`optim_step`."""

    model_id: Name
    seq_id: Count | None = None
    adam_params: Adam


class SaveWeights(Body):
    """`save_weights` and `save_weights_for_sampler`."""

    model_id: Name
    path: Name | None = None
    seq_id: Count | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: TextMetadata = None


class SetLifetime(Body):
    """`ttl` of a checkpoint: None lets it stay."""

    ttl_seconds: Lifetime | None = None


class CopyWeights(Body):
    """`copy_weights`; there are no projects, so the destination project has no effect."""

    source_path: Name
    session_id: Name | None = None
    model_seq_id: Count | None = None
    destination_project_id: Name | None = None
    ttl_seconds: Lifetime | None = None
    weights_access_token: None = None


class SearchCursor(Body):
    """The position at which the next page of a search begins."""

    last_created_at: Annotated[
        str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$")
    ]
    last_session_id: Name

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        datetime.fromisoformat(self.last_created_at)
        return self


class SearchSessions(Body):
    """`sessions/search`: there is one owner and no project, so neither filters."""

    session_id: Name | None = None
    project_ids: list[Name] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str | None, Field(min_length=1, max_length=300)] = None
    owner: dict[str, Any] | None = None
    statuses: list[dict[str, Any]] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None


class CreateSampler(Body):
    """`create_sampling_session`."""

    session_id: Name
    sampling_session_seq_id: Count
    base_model: Name | None = None
    model_path: Name | None = None


class PromptChunk(Body):
    """A piece of a prompt: tokens and nothing else."""

    tokens: list[int]
    type: Annotated[str | None, Field(pattern="^encoded_text$")] = "encoded_text"


class ModelInput(Body):
    """A prompt as token ids."""

    chunks: list[PromptChunk]

    def join_tokens(self) -> tuple[int, ...]:
        """Return the tokens of all pieces."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class Sampling(Body):
    """The sampling settings.

    Without `stop` the model's own stop tokens end an answer; with it, only the texts or tokens of
    `stop` do.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: StopText | StopTexts | StopTokens | None = None
    temperature: Annotated[float, AfterValidator(_check_temperature)] = 1.0
    top_k: int = Field(default=-1, ge=-1, le=2**31)
    top_p: float = Field(default=1.0, ge=MIN_TOP_P, le=1)


class TensorData(Body):
    """A tensor in JSON, dense or sparse by rows."""

    data: list[Int64]
    dtype: Literal["int64"]
    shape: list[Int64] | None = None
    sparse_crow_indices: list[Int64] | None = None
    sparse_col_indices: list[Int64] | None = None


class SampleBody(Body):
    """`asample`: completions, and log-probabilities of the prompt."""

    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt: ModelInput
    sampling_params: Sampling
    base_model: Name | None = None
    model_path: Name | None = None
    sampling_session_id: Name | None = None
    seq_id: Count | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_CANDIDATES)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MAX_CANDIDATES)
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=MAX_CANDIDATES)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    record_stability_info: bool | None = None


class Retrieve(Body):
    """`retrieve_future`, `cancel_future`."""

    request_id: Name
    model_id: Name | None = None
    allow_metadata_only: bool = False


class WeightsInfo(Body):
    """`weights_info`."""

    tinker_path: Name


B = TypeVar("B", bound=Body)


def read(kind: type[B], body: bytes) -> B:
    """Return the body as a model; raise `HttpRefusal` with 400 and its first error."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise HttpRefusal(400, f"{kind.__name__}: {where}: {first['msg']}{more}"[:500]) from error
