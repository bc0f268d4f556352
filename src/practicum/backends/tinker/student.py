"""Train a student at a service: its settings, unsupported recipes, and the backend."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from practicum.backends.tinker.probing import find_ignored_settings
from practicum.backends.tinker.trainer import (
    ServiceTrainer,
    StudentClient,
    explain_unsupported_term,
)
from practicum.errors import CapabilityError, CheckpointError, ModelError, RecipeError
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.models.tensors import read_tensors, write_stems
from practicum.objective import Objective
from practicum.ports import (
    Backend,
    BackendContext,
    Model,
    Student,
    WeightUpdateRule,
)
from practicum.ports.paper import PaperBackend
from practicum.remote.tinker import Connection, ServiceConfig
from practicum.text import Renderer
from practicum.text.tokenizers import load_renderer

log = logging.getLogger(__name__)

ALPHA = 32.0
"""The scale of a service's adapters is ALPHA / rank."""

UNKNOWN_CONTEXT = 1 << 20
"""The context length if a service does not report one."""


class Config(ServiceConfig):
    """The settings of a service; the student's `model` is the name of a base model there."""

    checkpoints_here: ClassVar[bool] = False
    adapter_alpha: ClassVar[float | None] = ALPHA
    """False: checkpoints hold only the address of the student's weights."""
    not_compared: ClassVar[frozenset[str]] = frozenset({"probe"})
    """Settings that may change when a run is resumed: the probe does not change the student."""
    type: Literal["tinker"] = "tinker"
    tokenizer: str | None = Field(
        default=None,
        description="the base model's tokenizer: folder, hub name or packaged name; none: the "
        "tokenizer that the service names",
    )
    probe: bool = Field(
        default=True,
        description="try at the start, with new adapters, which optimizer settings the service "
        "ignores, and refuse it for them",
    )
    fixed: tuple[Literal["betas", "epsilon", "max_grad_norm", "weight_decay"], ...] = Field(
        default=(),
        description="optimizer settings that the service fixes itself, at the recipe's values",
    )

    def build_single(self) -> "Config":
        """Return the same settings: the weights are at the service."""
        return self

    def problems(
        self,
        student: StudentConfig,
        objective: Objective,
        mixes_tokens: bool,
        staleness: int,
        models: Mapping[str, ScorerConfig],
    ) -> list[str]:
        """List the recipe settings that a service does not support, each with a replacement."""
        problems = list(_list_student_problems(student))
        problems += filter(None, map(explain_unsupported_term, objective.losses))
        if mixes_tokens:
            problems.append(
                "rollout.source: it decodes token by token with the teacher, which "
                "backend 'tinker' cannot; set source: mix(other=teacher)"
            )
        if staleness > MAX_STALENESS:
            problems.append(
                "rollout.max_staleness: a service keeps few of a student's weights to sample from, "
                f"the newest four of ours; set {MAX_STALENESS} or less"
            )
        return problems


MAX_STALENESS = 2


def _list_student_problems(student: StudentConfig) -> Iterator[str]:
    if not isinstance(student.model, str):
        yield (
            "student.model: backend 'tinker' trains a model of the service; write the name that it "
            "has there"
        )
    if student.lora is None:
        yield "student.lora: backend 'tinker' trains adapters; set student.lora: {rank: 16}"
    else:
        if student.lora.alpha != ALPHA:
            yield f"student.lora.alpha: adapters at a service have alpha {ALPHA:g}; leave it out"
        if student.lora.targets is not None or student.lora.rslora:
            yield "student.lora: targets and rslora are the service's; leave them out"
    if student.trainable_layers is not None:
        yield "student.trainable_layers: adapters at a service are around all layers; leave it out"
    if student.train_encoder:
        yield "student.train_encoder: adapters at a service are of the text model; leave it out"
    if student.quantization is not None:
        yield "student.quantization: the base model is the service's; leave it out"
    if student.dropout:
        yield "student.dropout: how the model learns is the service's; leave it out"
    if (
        student.dtype not in ("auto", "float32")
        or student.device != "auto"
        or student.trust_remote_code
    ):
        yield "student: dtype, device and trust_remote_code are the service's; leave them out"


def build(config: Config, context: BackendContext) -> Backend:
    """Open the backend; the session at the service starts with the student."""
    return TinkerBackend(config, context)


def build_on_paper(config: Config, context: BackendContext, answer_tokens: int) -> PaperBackend:
    """Raise an error: the sizes of a service's model are unknown, so nothing can be planned."""
    raise RecipeError(
        "plan: the student is at a service, so what it costs is not known here; leave backend out "
        "to plan it here"
    )


class TinkerBackend(Backend):
    """The student at a service, other models in this process; see `practicum.ports.Backend`."""

    def __init__(self, config: Config, context: BackendContext) -> None:
        self._config = config
        self._context = context

    def load_student(self, config: StudentConfig) -> Student:
        """Create adapters at the service; a local student with the same seed starts equal."""
        base, lora = config.model, config.lora
        assert isinstance(base, str) and lora is not None, (
            "the recipe was held against what the backend refuses"
        )
        context = self._context
        log.info(f"student: {base}")
        connection = Connection(self._config, "backend")
        context.at_end.callback(connection.close)

        def create(service):  # type: ignore[no-untyped-def]
            return service.create_lora_training_client(
                base_model=base, rank=lora.rank, seed=context.seed, train_unembed=False
            )

        trainer = ServiceTrainer(connection, base, create, context.meter)
        renderer = _load_renderer(self._config.tokenizer or trainer.get_tokenizer(), config)
        trainer.vocabulary = renderer.vocab_size
        trainer.special_ids = renderer.special_ids
        if self._config.probe:
            adapters = connection.request(lambda: create(connection.service), "trial adapters")
            self._refuse_ignored_settings(connection, adapters, renderer)
        return Student(
            trainer=trainer,
            renderer=renderer,
            context_length=trainer.get_context_length() or UNKNOWN_CONTEXT,
            source=f"{base} (rank {lora.rank})",
        )

    def _refuse_ignored_settings(
        self, connection: Connection, adapters: Any, renderer: Renderer
    ) -> None:
        """Raise CapabilityError if the service ignores an optimizer setting that it is sent."""
        ignored = find_ignored_settings(connection, adapters, renderer.vocab_size)
        unknown = [name for name in ignored if name not in self._config.fixed]
        if unknown:
            raise CapabilityError(
                f"backend: the service at {connection.address} ignores optimizer settings: "
                f"{', '.join(unknown)}; set them at the service to the recipe's values and write "
                f"backend.fixed: [{', '.join(ignored)}], or take another service"
            )

    def load_scorer(self, config: ScorerConfig, name: str) -> Model:
        """Load a scoring model into this process."""
        return self._context.local().load_scorer(config, name)

    def build_sampler(self, student: Student) -> StudentClient:
        """Return a client of the student's weights, which are published once per step."""
        return StudentClient(_require_service(student).build_sampling_client)

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> StudentClient:
        """Return a scorer with the student's live weights or with the base model's weights.

        Raises CapabilityError for other rules.
        """
        if rule.weights not in ("live", "frozen"):
            raise CapabilityError(
                f"teacher.weights {rule.weights!r} averages or copies the student's weights, which "
                "backend 'tinker' does not hold; set weights: frozen or live"
            )
        if rule.weights == "live":
            return self.build_sampler(student)
        base = _require_service(student).open_base_client()
        return StudentClient(lambda: base)

    def save(self, student: Student, folder: Path) -> None:
        """Save a checkpoint at the service, and write its address into the folder."""
        self.copy_state(student)(folder)

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        """Save a checkpoint at the service; return a function that writes its address."""
        return partial(write_stems, _require_service(student).save_state())

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        """Restore a checkpoint at the service; it always includes the optimizer's moments."""
        optimizer = read_tensors(folder / "optimizer.safetensors") if moments else {}
        _require_service(student).load_state(
            {"student": read_tensors(folder / "student.safetensors"), "optimizer": optimizer}
        )

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        """Refuse to export: the weights are at the service."""
        raise CheckpointError(
            f"the student is at a service, {student.source}, and its weights are not here; ask the "
            "service"
        )


def _require_service(student: Student) -> ServiceTrainer:
    assert isinstance(student.trainer, ServiceTrainer), (
        "a backend is given the students that it made"
    )
    return student.trainer


def _load_renderer(tokenizer: str, student: StudentConfig) -> Renderer:
    """Return the renderer of the student's prompts."""
    try:
        return load_renderer(student.model_copy(update={"model": tokenizer}))
    except ModelError as error:
        raise ModelError(
            f"{error} (the tokenizer of the student; set backend.tokenizer: a folder or a hub name)"
        ) from None
