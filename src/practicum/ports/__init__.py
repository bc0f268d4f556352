"""The protocols of the boundary: what a backend, a teacher and a task must be able to do.

A step is seven calls over these (see `practicum.training.loop.train_step`). The four verbs of a backend, `sample`, `score`,
`forward_backward` and `optim_step`, are those of the Tinker API, so the same loop drives a laptop and a service.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from practicum.costs import Meter, ModelDims, TrainableDims
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Capabilities, Objective, Signal
from practicum.text import Renderer
from practicum.types import (
    Datum,
    ForwardResult,
    Message,
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
    """One optimizer step: the learning rate of this step and the constants of AdamW (Loshchilov & Hutter 2019)."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@runtime_checkable
class SamplingClient(Protocol):
    """Draws completions and scores given ones, under weights that do not change while it is used."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """One completion a request, each from its own random stream, whatever the batching."""
        ...

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """What this model says about each request's tokens, in the form the signal needs or a richer one."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What `score` can answer."""
        ...


@runtime_checkable
class DecodeBatch(Protocol):
    """Texts that a model reads token by token, one row each, out of a queue of prompts."""

    @property
    def refills(self) -> bool:
        """Whether texts can be admitted while others are being read."""
        ...

    def admit(self, most: int) -> int:
        """Read the next prompts of the queue, at most so many, as rows after those that are there; how many it took.

        There is room for at least one where no row is left, and none is taken when the queue is empty.
        """
        ...

    def logits(self) -> Float[Tensor, "B V"]:
        """The logits of each row's next token."""
        ...

    def advance(self, tokens: Int[Tensor, " B"], keep: Sequence[int]) -> None:
        """Read each row's next token and go on with the rows in `keep` alone, in that order."""
        ...


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """One completion to draw with a teacher: its prompt as each of the two reads it, and the seed of its stream."""

    prompt_tokens: tuple[int, ...]
    teacher_prompt_tokens: tuple[int, ...]
    seed: int


@runtime_checkable
class LockstepClient(Protocol):
    """A client that can decode in lockstep with another of its kind: both read the same tokens as they are drawn."""

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> DecodeBatch:
        """Read the prompts, at most `rows` at a time and equal ones once, each with at most `new_tokens` after it."""
        ...

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: "LockstepClient",
        share: float,
        params: SamplingParams,
    ) -> list[Sample]:
        """One completion a request, each token from `share` times the teacher's distribution and the rest of this one's."""
        ...


@runtime_checkable
class TrainingClient(Protocol):
    """Holds the student: accumulates gradients of an objective and steps the optimizer."""

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """The gradient of the objective, normalised over all of `data` however it is split; dropout is seeded by `seed`."""
        ...

    def optim_step(self, params: AdamParams) -> Metrics:
        """Clip and apply the accumulated gradient, then forget it; a non-finite gradient is skipped and reported."""
        ...

    def snapshot(self) -> SamplingClient:
        """A client that goes on sampling from the weights of now, in another thread, while these are trained."""
        ...

    def refuses(self, objective: Objective) -> str | None:
        """Why this backend cannot train the objective, or None."""
        ...


@dataclass(frozen=True, slots=True)
class WeightUpdateRule:
    """How the weights of a self-teacher follow the student's.

    `live`: always the current ones. `frozen`: those of the start. `ema`: after each step
    `teacher = (1 - rate) * teacher + rate * student`. `periodic`: copied every `period` steps. A step has so many `updates`.
    """

    weights: Literal["live", "frozen", "ema", "periodic"]
    rate: float = 0.05
    period: int = 50
    updates: int = 1

    def hold_within_step(self) -> "WeightUpdateRule":
        """Return the rule for a scorer whose head is read while the student is updated.

        Live weights move between the updates of a step, and the hidden states that their head reads do not. So where a step has
        several updates they are copied after each step.
        """
        return (
            replace(self, weights="periodic", period=1)
            if self.weights == "live" and self.updates > 1
            else self
        )


@runtime_checkable
class StepFollower(Protocol):
    """What hears of the student's steps and may have something to save; whoever inherits from it has nothing until it says so."""

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student, or learn beside it; called once after each step with what the student learned from.

        Whoever does either declares `Capabilities.follows_student`.
        """

    def save_state(self) -> dict[str, Tensor]:
        """Return the tensors that a resume cannot recompute."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `save_state` gave."""


@runtime_checkable
class SelfTeacher(SamplingClient, StepFollower, Protocol):
    """A scorer that holds its own copy of the student's trainable weights and follows them by a `WeightUpdateRule`."""


@runtime_checkable
class Teacher(StepFollower, Protocol):
    """Scores rollouts, token for token. Whoever inherits from it writes no answers and has no state until it says so."""

    @property
    def capabilities(self) -> Capabilities:
        """Which signals this teacher can give."""
        ...

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """One signal a rollout, in order."""
        ...

    def sample(
        self, requests: "Sequence[TeacherRequest]", params: SamplingParams
    ) -> list[Sample] | None:
        """Return the teacher's own answers in its own context, or None where it cannot generate."""
        return None

    def voice(self, prompt: Prompt) -> "PromptedClient | None":
        """Return who would write this teacher's answer to a prompt, and the prompt as it reads it; None where nobody can."""
        return None


@runtime_checkable
class TeacherConfig(Protocol):
    """What a recipe says of a teacher."""

    @property
    def type(self) -> str:
        """The name of the teacher's module, which is the recipe's key."""
        ...

    def capabilities(self) -> Capabilities:
        """What the teacher can answer, as far as its settings tell."""
        ...


@runtime_checkable
class HoldsTeachers(Protocol):
    """The settings of a teacher with others inside."""

    def members(self) -> Mapping[str, TeacherConfig]:
        """The settings of each teacher inside by where they are written: `teacher`, or `teachers.NAME` for one of several."""
        ...


def walk(
    config: TeacherConfig, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], TeacherConfig]]:
    """Yield a teacher's settings and those of every teacher inside, each after the keys that lead to it."""
    yield keys, config
    if isinstance(config, HoldsTeachers):
        for key, member in config.members().items():
            yield from walk(member, (*keys, key))


@dataclass(frozen=True, slots=True)
class PromptedClient:
    """Decode with a teacher, token by token: a client, and a prompt as the teacher reads it."""

    client: SamplingClient
    prompt_tokens: tuple[int, ...]
    """The prompt's tokens in the teacher's own context."""
    accepts_tokens: bool = True
    """True where the client goes on from any tokens after the prompt; one that only answers messages holds no conversation."""


@dataclass(frozen=True, slots=True)
class TeacherRequest:
    """A prompt for the teacher to answer itself, with the seed of its random stream."""

    prompt: Prompt
    seed: int


def _raise_no_renderer(config: Any) -> Renderer:
    raise NotImplementedError("this context loads no tokenizers")


@dataclass(frozen=True, slots=True)
class TeacherContext:
    """Build a teacher from these: how the student reads, models by their settings, and the teachers inside."""

    renderer: Renderer
    """Turn messages into the student's tokens."""
    self_teacher: Callable[[WeightUpdateRule], SelfTeacher]
    """Return the student's own weights as a scorer, which follow it by a rule."""
    load_model: Callable[[Any], "Model"]
    """Load another model by its settings."""
    build: Callable[["TeacherContext", Any], Teacher]
    """Build a teacher inside."""
    base_dir: Path = Path()
    """Resolve the relative paths of a recipe against this folder."""
    scores: Path | None = None
    """Keep answers in this folder where the recipe names none; None: keep none."""
    after_training: list[Callable[[], None]] = field(default_factory=list)
    """Add what is called when the training is over, before the last evaluation; not where the training fails."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Register what is closed when no client is used any more, however that comes about."""
    meter: Meter | None = None
    """Count bytes to and from other processes."""
    load_renderer: Callable[[Any], Renderer] = _raise_no_renderer
    """Read a tokenizer without the weights."""
    count: Callable[[SamplingClient], SamplingClient] = lambda client: client
    """Wrap a client, so that what it is asked for is counted."""
    keep: Callable[[SamplingClient, Callable[[Path], str]], SamplingClient] = lambda client, name: (
        client
    )
    """Make of a client what a teacher around this one makes of it, given what names its answers in a folder."""
    task: "Task | None" = None
    """The source of the prompts, for a teacher that the task itself knows."""
    reads: Callable[[Path], None] = lambda path: None
    """Hear of a file besides models that the answers depend on, so that a resumed run is held against it."""
    on_paper: bool = False
    """True where models have sizes alone, so that their answers are not kept."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that writes and scores, as a backend gives it.

    `source` is the folder or the name that its weights are known by. Where `shape` is not known its tokens are counted and its
    operations are not. `unsampled` says why nothing can be drawn from it, where that is so.
    """

    client: SamplingClient
    renderer: Renderer
    context_length: int
    source: str
    shape: ModelDims | None = None
    unsampled: str = ""


@dataclass(frozen=True, slots=True)
class Learner:
    """The student, as a backend gives it.

    `weights` are the tensors that learn, by name, where they are in this process, and None elsewhere. `state_bytes` is what the
    files of `Backend.save` take at most, once the optimizer has its moments.
    """

    trainer: TrainingClient
    renderer: Renderer
    context_length: int
    source: str
    shape: ModelDims | None = None
    learning: TrainableDims | None = None
    weights: Mapping[str, Tensor] | None = None
    state_bytes: int = 0


@runtime_checkable
class Backend(Protocol):
    """Where models live: this process, another one, a service, or paper."""

    def student(self, config: StudentConfig) -> Learner:
        """Load the model that learns; ModelError where it cannot be loaded or cannot be sampled from."""
        ...

    def scorer(self, config: ScorerConfig, name: str) -> Model:
        """Load a model that is only asked; `name` is its role in the run, such as `teacher/math`."""
        ...

    def sampler(self, student: Learner) -> SamplingClient:
        """Return a client that samples from the student's weights as they are at each call."""
        ...

    def self_teacher(self, student: Learner, rule: WeightUpdateRule, name: str) -> SelfTeacher:
        """Return the student's own weights as a scorer, which follow it by `rule`; `name` as for `scorer`."""
        ...

    def save(self, student: Learner, folder: Path) -> None:
        """Write weights and moments into an existing folder, as `student.safetensors` and others beside it."""
        ...

    def load(self, student: Learner, folder: Path, *, moments: bool = True) -> None:
        """Restore what `save` wrote, without the optimizer's moments if they are not wanted.

        Raises CheckpointError where the tensors are those of another model.
        """
        ...

    def export(self, student: Learner, folder: Path) -> None:
        """Write the student as a model folder that transformers reads, adapters merged."""
        ...


@dataclass(frozen=True, slots=True)
class BackendContext:
    """Open a backend with these: a seed, a place for models from scratch, and what is counted and closed."""

    seed: int
    """Seed new weights with this."""
    models: Path
    """Make models from scratch in this folder."""
    task: "Callable[[], Task]"
    """Return the task, whose characters and answers models from scratch are made with."""
    local: Callable[[], Backend]
    """Open the backend of this process, for the models that a backend does not hold itself."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Register what is closed when no client is used any more, however that comes about."""
    meter: Meter | None = None
    """Count bytes to and from other processes."""


@runtime_checkable
class Task(Protocol):
    """A source of prompts with its verifier; it knows text only."""

    def train_prompts(self) -> Sequence[Prompt]:
        """The prompts to train on, in a fixed order."""
        ...

    def heldout_prompts(self) -> Sequence[Prompt]:
        """The prompts to evaluate on; none of them is a training prompt."""
        ...

    def reward(self, rollout: Rollout) -> float | None:
        """Return how right the rollout is, 0 to 1, or None where nobody can say.

        `rollout.text` is what the student said; a conversation also has `rollout.turns`, and `rollout.stop_reason` says whether
        the environment broke it off.
        """
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """What an episode answers to a turn.

    `message` is the next turn, of the role `user` or another one that the chat template knows, such as `tool`; None: the
    conversation is over. `notes` are texts about the rollout that the student does not read, by name.
    """

    message: Message | None
    notes: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Episode(Protocol):
    """One conversation with an environment. It may hold a process, a browser or a game, and it may fail.

    What a method raises ends this conversation alone: with the stop reason `timeout` for TimeoutError, else `error`. The
    note `error` of the rollout then says what was raised.
    """

    def step(self, turn: str) -> Observation:
        """Answer the student's turn."""
        ...

    def close(self) -> None:
        """Let go of what the episode holds; called once, also after an error."""
        ...


@runtime_checkable
class Environment(Task, Protocol):
    """A task that answers back: a completion is a conversation with it, and its reward is for the whole of it."""

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """Begin a conversation about a prompt; whatever is random in it follows from `seed`.

        A conversation that ends within its first turn is never opened.
        """
        ...


@runtime_checkable
class Expert(Task, Protocol):
    """A task that knows what to say. Where it is an environment too, an episode's answers follow from prompt and turns alone."""

    def expert(self, prompt: Prompt, said: Sequence[str]) -> Mapping[str, float]:
        """Return the probabilities of the whole text of the next turn, after the turns so far; together they are 1."""
        ...


@runtime_checkable
class HasAlphabet(Task, Protocol):
    """A task that knows the characters of all that can be said in it, for models made from scratch."""

    @property
    def letters(self) -> str:
        """Each of them once."""
        ...
