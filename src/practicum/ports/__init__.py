"""The protocols that backends, teachers and tasks implement.

A training step is seven calls of these methods (see `practicum.training.loop.train_step`). The four
methods of a backend, `sample`, `score`, `forward_backward` and `optim_step`, match the Tinker API,
so the same loop drives a laptop and a service.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from practicum.core.plugins import build_part
from practicum.costs import Meter, ModelDims, TrainableDims
from practicum.errors import RecipeError
from practicum.models.config import ScorerConfig, SpeculationConfig, StudentConfig
from practicum.models.digests import ModelRecord
from practicum.models.tensors import SavedTensor
from practicum.objective import Capabilities, Objective, Signal
from practicum.ports.endings import ModelEnding as ModelEnding
from practicum.ports.engines import EngineChoice
from practicum.ports.tasks import Episode as Episode
from practicum.ports.tasks import Observation as Observation
from practicum.ports.tasks import OpensEpisodes as OpensEpisodes
from practicum.ports.tasks import SampledTurn as SampledTurn
from practicum.ports.tasks import Task as Task
from practicum.ports.tasks import TaskConfig as TaskConfig
from practicum.ports.tasks import TaskContext as TaskContext
from practicum.ports.tasks import Toolbox as Toolbox
from practicum.ports.tasks import ToolSession as ToolSession
from practicum.ports.tasks import TurnRequest as TurnRequest
from practicum.ports.together import JointTokens as JointTokens
from practicum.ports.together import MixtureRule as MixtureRule
from practicum.ports.together import Reading as Reading
from practicum.ports.together import TokenRule as TokenRule
from practicum.text import Renderer, VocabularyMap, compare_renderers
from practicum.types import (
    Datum,
    ForwardResult,
    FrozenConfig,
    Metrics,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """The settings of one AdamW step (Loshchilov & Hutter 2019), its learning rate included."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@runtime_checkable
class DecodeBatch(Protocol):
    """Prompts from a queue that are decoded token by token over a KV cache, one row each."""

    @property
    def supports_refill(self) -> bool:
        """True if rows can be admitted while others decode (continuous batching)."""
        ...

    def admit(self, max_rows: int) -> int:
        """Prefill at most `max_rows` queued prompts, append them as rows, and return their number.

        At least one prompt is admitted if no row is active and the queue is not empty.
        """
        ...

    def logits(self) -> Float[Tensor, "B V"]:
        """Return the logits of each row's next token."""
        ...

    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """Append one token to each row, then keep only the rows in `keep`, in that order."""
        ...


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """One completion to sample from student and teacher together, with the prompt of each.

    Each model has the random stream of an ordinary completion.
    """

    prompt_tokens: tuple[int, ...]
    teacher_prompt_tokens: tuple[int, ...]
    seed: int
    teacher_seed: int = 0


class SamplingClient:
    """A model that samples and scores completions; its weights do not change during a call.

    A client must have `sample`, `score` and `capabilities`. All further methods are optional: a
    class supports a feature if it overrides the method.
    """

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, each from its own random stream.

        The batching does not change the result.
        """
        raise NotImplementedError

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score each request's tokens, in the form that `signal` needs or in a richer form."""
        raise NotImplementedError

    @property
    def capabilities(self) -> Capabilities:
        """Declare the signals that `score` can return."""
        raise NotImplementedError

    def remember_texts(self) -> "SamplingClient":
        """Return a client that reads only the new tokens of a text that it sampled before.

        Its weights must not change while it is used. A client that cannot keep texts returns itself.
        """
        return self

    @property
    def decodes_by_token(self) -> bool:
        """Return True if two such clients can decode together and read each sampled token."""
        return type(self).open_decode_batch is not SamplingClient.open_decode_batch

    def open_decode_batch(
        self, prompts: Sequence[tuple[int, ...]], max_rows: int, max_new_tokens: int
    ) -> DecodeBatch:
        """Decode at most `max_new_tokens` after each prompt, `max_rows` prompts at a time.

        Equal prompts are prefilled once.
        """
        raise NotImplementedError

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: "SamplingClient",
        rule: TokenRule,
        params: SamplingParams,
    ) -> list[Sample]:
        """Sample one completion per request, each token by the rule from both models' readings."""
        raise NotImplementedError


@runtime_checkable
class TrainingClient(Protocol):
    """The student's trainer: accumulates gradients of an objective and steps the optimizer."""

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Accumulate the gradient of the objective; `seed` seeds dropout.

        The loss is normalised over all of `data`, so the micro-batches do not change the result.
        """
        ...

    def optim_step(self, params: AdamParams) -> Metrics:
        """Clip, apply and clear the accumulated gradient; skip and report a non-finite one."""
        ...

    def snapshot(self) -> SamplingClient:
        """Return a client that samples from the current weights while they train."""
        ...

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Explain why this backend cannot train the objective; return None if it can."""
        ...


@dataclass(frozen=True, slots=True)
class WeightUpdateRule:
    """The rule by which a self-teacher's weights follow the student's.

    `live`: the current weights. `frozen`: the initial weights. `ema`: after each step
    `teacher = (1 - rate) * teacher + rate * student`. `periodic`: a copy every `period` steps.
    `updates` is the number of optimizer steps in a training step.
    """

    weights: Literal["live", "frozen", "ema", "periodic"]
    rate: float = 0.05
    period: int = 50
    updates: int = 1

    def hold_within_step(self) -> "WeightUpdateRule":
        """Return a rule that keeps the weights constant within a training step."""
        # Scoring returns hidden states, and the loss applies the head to them later. Live weights
        # change between the updates of a step, so head and hidden states would not match.
        if self.weights == "live" and self.updates > 1:
            return replace(self, weights="periodic", period=1)
        return self


class StepFollower:
    """An object notified of each training step that can save state; by default it does neither."""

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student, or train together with it, after a step on `data`.

        Classes that override this method declare `Capabilities.follows_student`.
        """

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the tensors that a resume cannot recompute."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `save_state` returned."""


class SelfTeacher(StepFollower, SamplingClient):
    """A scorer with a copy of the student's trainable weights, updated by a `WeightUpdateRule`."""


class Teacher(StepFollower):
    """A scorer of rollouts, token by token. By default it generates nothing and has no state."""

    @property
    def capabilities(self) -> Capabilities:
        """Declare the signals that this teacher can give."""
        raise NotImplementedError

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return one signal per rollout, in order."""
        raise NotImplementedError

    def sample(
        self, requests: "Sequence[TeacherRequest]", params: SamplingParams
    ) -> list[Sample] | None:
        """Sample completions in the teacher's own context; return None if it cannot generate."""
        return None

    def bind_prompt(self, prompt: Prompt) -> "PromptedClient | None":
        """Return the client that completes the prompt, or None if the teacher cannot generate."""
        return None


class PartConfig(FrozenConfig):
    """The settings of a part that may ask teachers: a teacher itself, a scorer or a note."""

    def members(self) -> "Mapping[str, TeacherConfig]":
        """Return the settings of its teachers by key: `teacher`, or `teachers.NAME`.

        By default they are the fields that hold the settings of a teacher.
        """
        return {name: part for name, part in self if isinstance(part, TeacherConfig)}


class TeacherConfig(PartConfig):
    """The settings of a teacher in a recipe; subclasses only have to define `capabilities`.

    A subclass has a field `type` with its name as the default.
    """

    @property
    def name(self) -> str:
        """The name of the teacher's module, as the recipe writes it."""
        return str(type(self).model_fields["type"].default)

    def capabilities(self) -> Capabilities:
        """Declare the signals that the teacher can give, as far as the settings decide it."""
        raise NotImplementedError

    def shows(self, names: Collection[str]) -> bool:
        """Return True if one of the names is a placeholder of the teacher's context."""
        return False

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise DataError at the first prompt that the teacher cannot score."""

    @property
    def hides_media(self) -> bool:
        """True if the teacher reads prompts without their pictures and sounds."""
        return False

    @property
    def is_pool(self) -> bool:
        """True if each answer combines several answers, which no other teacher can combine."""
        return False

    @property
    def money_limit(self) -> float | None:
        """The most money that the teacher's answers may cost, or None."""
        return None

    def estimate_money(self, input_tokens: float, output_tokens: float) -> float | None:
        """Return the price of an answer with these numbers of tokens, or None without prices."""
        return None


Config = TypeVar("Config", bound=PartConfig)


def walk(
    config: Config, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Config | TeacherConfig]]:
    """Yield the settings of a part and of all teachers inside it, each with the keys to it."""
    yield keys, config
    for key, member in config.members().items():
        yield from walk(member, (*keys, key))


@dataclass(frozen=True, slots=True)
class PromptedClient:
    """A client and a prompt in its teacher's own context, ready for token-by-token decoding."""

    client: SamplingClient
    prompt_tokens: tuple[int, ...]
    """The prompt's tokens in the teacher's own context."""
    accepts_tokens: bool = True
    """True if the client can continue from any tokens; a server that answers messages cannot."""


@dataclass(frozen=True, slots=True)
class TeacherRequest:
    """A prompt that the teacher completes itself, with the seed of its random stream."""

    prompt: Prompt
    seed: int


class TeacherServices:
    """The services of a run to the teachers that it builds; `path` is a teacher's name in the run.

    The path is the teacher's role followed by the keys of its members, such as `teacher/math`.
    Meters, dimensions and digests are kept under it.
    """

    def build_teacher(self, context: "TeacherContext", config: Any) -> Teacher:
        """Build a teacher from its settings."""
        return build_part("teachers", Teacher, config, context)

    def load_self(self, rule: WeightUpdateRule, path: str) -> SelfTeacher:
        """Return a scorer with the student's weights, updated by a rule."""
        raise NotImplementedError("this context has no student")

    def load_model(self, config: Any, path: str) -> "Model":
        """Load another model by its settings."""
        raise NotImplementedError("this context loads no models")

    def load_renderer(self, config: Any, path: str) -> Renderer:
        """Load a tokenizer without the weights."""
        raise NotImplementedError("this context loads no tokenizers")

    def load_ending(self, config: Any, path: str) -> ModelEnding:
        """Read only the last norm and the head of a model."""
        raise NotImplementedError("this context reads no ends of models")

    def register_file(self, file: Path, path: str) -> None:
        """Register a file (not a model) that changes the signals; a resumed run checks its digest."""

    def find_meter(self, path: str) -> Meter | None:
        """Return what counts bytes to and from other processes, or None."""
        return None

    def count_client(self, client: SamplingClient, path: str) -> SamplingClient:
        """Wrap a client in one that counts its tokens and FLOPs."""
        return client


@dataclass(frozen=True, slots=True)
class TeacherContext:
    """The objects from which a teacher is built; a wrapper changes some for its inner teacher."""

    renderer: Renderer
    """The student's renderer: turns messages into tokens."""
    services: TeacherServices = field(default_factory=TeacherServices)
    """The run, which loads models and counts their usage."""
    path: str = "teacher"
    """The name of this teacher in the run."""
    base_dir: Path = Path()
    """The folder at which relative paths of the recipe start."""
    scores_dir: Path | None = None
    """The folder for cached scores if the recipe names none; None: no cache."""
    after_training: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call after a successful training, before the last evaluation."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Resources to close when no client is used any more, also after an error."""
    compare: Callable[[Renderer, Renderer], VocabularyMap | None] = compare_renderers
    """Compare the student with a teacher; VocabularyError if they contradict each other."""
    wrap_client: Callable[[SamplingClient, Callable[[Path], str]], SamplingClient] = (
        lambda client, _: client
    )
    """Wrap a client for the enclosing teacher; the function names its scores in a cache."""
    task: Task | None = None
    """The source of the prompts, for teachers that ask the task itself."""
    notes: tuple[str, ...] = ()
    """The names of the recipe's notes, which some rollouts have but no prompt has."""
    is_dry_run: bool = False
    """True if models are weightless, so that their scores are not cached."""

    def build(self, config: Any, member: str = "") -> Teacher:
        """Build a teacher inside this one; `member` is its name if there are several."""
        path = f"{self.path}/{member}" if member else self.path
        return self.services.build_teacher(replace(self, path=path), config)

    def load_self(self, rule: WeightUpdateRule) -> SelfTeacher:
        """Return a scorer with the student's weights, updated by a rule."""
        return self.services.load_self(rule, self.path)

    def load_model(self, config: Any) -> "Model":
        """Load another model by its settings."""
        return self.services.load_model(config, self.path)

    def load_renderer(self, config: Any) -> Renderer:
        """Load a tokenizer without the weights."""
        return self.services.load_renderer(config, self.path)

    def load_ending(self, config: Any) -> ModelEnding:
        """Read only the last norm and the head of a model."""
        return self.services.load_ending(config, self.path)

    def register_file(self, file: Path) -> None:
        """Register a file (not a model) that changes the signals; a resumed run checks its digest."""
        self.services.register_file(file, self.path)

    def count_client(self, client: SamplingClient) -> SamplingClient:
        """Wrap a client in one that counts its tokens and FLOPs."""
        return self.services.count_client(client, self.path)

    @property
    def meter(self) -> Meter | None:
        """Return what counts bytes to and from other processes, or None."""
        return self.services.find_meter(self.path)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that samples and scores, as a backend returns it."""

    client: SamplingClient
    renderer: Renderer
    context_length: int
    source: str
    """The folder or name of its weights."""
    dims: ModelDims | None = None
    """Its dimensions; None: its tokens are counted and its FLOPs are not."""
    no_sampling_reason: str = ""
    """The reason why this model cannot sample; empty if it can."""
    decoding: str = ""
    """The way in which it decodes, if there are several: their tokens differ by rounding."""
    record: ModelRecord | None = None
    """The files that were loaded, if the run records them and they are here."""
    dtype: str = ""
    """The dtype of its products; empty if it is unknown here."""


@dataclass(frozen=True, slots=True)
class Student:
    """The student, as a backend returns it."""

    trainer: TrainingClient
    renderer: Renderer
    context_length: int
    source: str
    dims: ModelDims | None = None
    """Its dimensions; None: its tokens are counted and its FLOPs are not."""
    trainable_dims: TrainableDims | None = None
    """The dimensions of its trainable part."""
    weights: Mapping[str, Tensor] | None = None
    """The trainable tensors by name if they are in this process, otherwise None."""
    state_bytes: int = 0
    """The largest size of the files of `Backend.save`, the optimizer's moments included."""
    decoding: str = ""
    """The way in which it decodes, if there are several: their tokens differ by rounding."""
    record: ModelRecord | None = None
    """The files that were loaded, if the run records them and they are here."""
    dtype: str = ""
    """The dtype of its products; empty if it is unknown here."""


class ScalarModel(StepFollower):
    """A language model's body with one linear output, one number per token, and its own optimizer.

    The output starts at 0, so a new model predicts 0 everywhere.
    """

    def predict(self, texts: Sequence[ScoreRequest]) -> list[Float[Tensor, " _"]]:
        """Return the number of the state before each of a text's `tokens`, in float32.

        To read the state after a whole completion, append any one token.
        """
        raise NotImplementedError

    def fit(
        self,
        texts: Sequence[ScoreRequest],
        slopes: Sequence[Float[Tensor, " _"]],
        params: AdamParams,
    ) -> Metrics:
        """Take one step of AdamW; `slopes` are the loss's derivatives in each number of `predict`.

        Without a finite gradient nothing changes, and the metric `skipped` is 1.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LoadedScalar:
    """A loaded model with one output number per token."""

    model: ScalarModel
    renderer: Renderer
    source: str
    """The folder or name of its weights."""
    dims: ModelDims
    trainable_dims: TrainableDims
    record: ModelRecord | None = None
    """The files that were loaded, if the run records them."""
    dtype: str = ""
    """The dtype of its products; empty if it is unknown here."""


class Backend:
    """The owner of models: this process, another process, a service, or a dry run."""

    def load_student(self, config: StudentConfig) -> Student:
        """Load the student. Raises ModelError if it cannot be loaded or cannot sample."""
        raise NotImplementedError

    def load_scorer(self, config: ScorerConfig, name: str) -> Model:
        """Load a frozen model; `name` is its role in the run, such as `teacher/math`."""
        raise NotImplementedError

    def load_scalar(self, config: StudentConfig, name: str) -> LoadedScalar | None:
        """Load a model with one output number per token; the settings decide which weights are
        trained.

        `name` is its role in the run. None if the backend cannot host it; it is then loaded into
        this process.
        """
        return None

    def share_student(self, student: Student) -> LoadedScalar | None:
        """Return a linear output on the student's body; `fit` adds the body's gradient to the student's.

        The model trains and saves only the output. None if the student is in another process.
        """
        return None

    def build_sampler(self, student: Student) -> SamplingClient:
        """Return a client that samples from the student's current weights at each call."""
        raise NotImplementedError

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> SelfTeacher:
        """Return a scorer with the student's weights, updated by `rule`; `name` is its role."""
        raise NotImplementedError

    def save(self, student: Student, folder: Path) -> None:
        """Write weights and moments into an existing folder: `student.safetensors` and others."""
        raise NotImplementedError

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        """Copy state off its device tensor by tensor; return a writer that can run concurrently."""
        raise NotImplementedError

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        """Restore the files of `save`; CheckpointError if the tensors belong to another model."""
        raise NotImplementedError

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        """Write a model folder with adapters merged; with `adapter`, the adapters for peft."""
        raise NotImplementedError

    def export_drafter(self, student: Student, folder: Path, layout: str) -> None:
        """Write a drafter's folder for an engine; RecipeError if the student is no drafter."""
        raise RecipeError(
            f"--format {layout}: the run trained no drafter; leave --format out to export its model"
        )


@dataclass(frozen=True, slots=True)
class BackendContext:
    """The objects from which a backend is opened."""

    seed: int
    """The seed of new weights."""
    models_dir: Path
    """The folder in which from-scratch models are made."""
    task: Callable[[], Task]
    """Return the task; its characters and answers define a from-scratch model."""
    local: Callable[[], Backend]
    """Open the backend of this process, for models that a service does not hold."""
    models: Sequence[ScorerConfig] = ()
    """The frozen models that will be loaded, as far as the recipe determines them."""
    scalars: Sequence[StudentConfig] = ()
    """The models with one output number per token, loaded and trained next to the student."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Resources to close when no client is used any more, also after an error."""
    meter: Meter | None = None
    """Counts bytes to and from other processes."""
    engine: EngineChoice | None = None
    """The program that samples for the student; `Student.decoding` then begins with its type."""
    speculation: SpeculationConfig | None = None
    """The drafter with which the student samples."""
    pictures: bool = False
    """True if prompts have pictures; otherwise models of pictures only read texts."""
    keeps_records: bool = False
    """True if the files of models are recorded, and compared at each load."""
    planned_device: str | None = None
    """The type of device of a dry run; None: this machine's."""
    planned_memory: int | None = None
    """The bytes of the GPU of a dry run, where it is planned for one."""
