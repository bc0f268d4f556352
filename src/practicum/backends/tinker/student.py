"""What a recipe says of a student at a service, what cannot be asked of it, and how it is reached."""

import logging
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from practicum.backends.tinker.trainer import ServiceTrainer, StudentClient
from practicum.errors import CapabilityError, CheckpointError, ModelError, RecipeError
from practicum.models.config import ModelConfig, ScorerConfig, StudentConfig
from practicum.models.tensors import read_tensors, write_tensors
from practicum.objective import Objective, Term
from practicum.ports import Backend, BackendContext, Learner, Model, WeightUpdateRule
from practicum.ports.paper import PaperBackend
from practicum.remote.tinker import Connection, ServiceConfig
from practicum.text import Renderer
from practicum.text.tokenizers import load_renderer

log = logging.getLogger(__name__)

ALPHA = 32.0
"""The scale of a service's adapters is ALPHA / rank."""

ENTROPIES = frozenset({"student_entropy", "teacher_entropy"})
"""Facts of whole distributions, which a service does not tell."""

UNKNOWN_CONTEXT = 1 << 20
"""The longest text where a service does not say."""


class Config(ServiceConfig):
    """A service and what of the student it does not say. The student's `model` is the name of a base model there."""

    checkpoints_here: ClassVar[bool] = False
    """Checkpoints hold the address of the student's weights alone."""
    not_compared: ClassVar[frozenset[str]] = frozenset()
    """Settings that may be other ones in a resumed run, because they change no token and no more than rounding."""
    type: Literal["tinker"] = "tinker"
    tokenizer: str | None = Field(
        default=None,
        description="the base model's tokenizer: folder, hub name or packaged name; none: the one that the service names",
    )

    def problems(
        self, student: StudentConfig, objective: Objective, source: str, staleness: int
    ) -> list[str]:
        """What of a recipe cannot be done at a service, each with what to write instead."""
        mixed = "rollout.source: 'token_mix' decodes token by token with the teacher, which backend 'tinker' cannot; write "
        return [
            *_of_student(student),
            *(problem for term in objective.losses if (problem := explain_unsupported(term))),
            *([f"{mixed}source: mix(other=teacher)"] if source == "token_mix" else []),
            *([TOO_OLD] if staleness > MOST_STALE else []),
        ]


MOST_STALE = 2
TOO_OLD = (
    "rollout.max_staleness: a service keeps few of a student's weights to sample from, the newest four of ours; write "
    f"{MOST_STALE} or less"
)


def _of_student(student: StudentConfig) -> list[str]:
    problems = []
    if not isinstance(student.model, str):
        problems.append(
            "student.model: backend 'tinker' trains a model of the service; write the name that it has there"
        )
    if student.lora is None:
        problems.append(
            "student.lora: backend 'tinker' trains adapters; write student.lora: {rank: 16}"
        )
    elif student.lora.alpha != ALPHA:
        problems.append(
            f"student.lora.alpha: adapters at a service have alpha {ALPHA:g}; leave it out"
        )
    if student.trainable_layers is not None:
        problems.append(
            "student.trainable_layers: adapters at a service are around all layers; leave it out"
        )
    if student.dropout:
        problems.append("student.dropout: how the model learns is the service's; leave it out")
    if student.dtype != "float32" or student.device != "auto" or student.trust_remote_code:
        problems.append(
            "student: dtype, device and trust_remote_code are the service's; leave them out"
        )
    return problems


def explain_unsupported(term: Term) -> str | None:
    """Why a service cannot train a term, with what it can; None where it can.

    It tells log-probabilities of tokens that are named, so whole distributions and what is made of them are out of reach.
    """
    if term.signal.question is not None and term.signal.question.whole:
        return (
            f"objective: signal {term.signal.type!r} needs the student's whole distribution, which backend 'tinker' does not see; "
            "write topk(20), topk(20, support=teacher), sampled, score or text"
        )
    k, support = term.signal.candidates, term.signal.chooser
    if k and support not in ("student", "teacher"):
        return (
            f"objective: backend 'tinker' has no support {support!r}; write topk({k}, support=student) or "
            f"topk({k}, support=teacher)"
        )
    if not term.weighs_by.isdisjoint(ENTROPIES):
        return (
            f"objective: weights {term.weights.name!r} are made of entropies, which backend 'tinker' does not see; write "
            "divergence_top, trust, or weights of log-probabilities"
        )
    return None


def build(config: Config, context: BackendContext) -> Backend:
    """Begin a session at the service."""
    return TinkerBackend(config, context)


def build_on_paper(config: Config, context: BackendContext, answer_tokens: int) -> PaperBackend:
    """Refuse: the sizes of a service's model are not known here."""
    raise RecipeError(
        "plan: the student is at a service, so what it costs is not known here; leave backend out to plan it here"
    )


class TinkerBackend:
    """The student at a service, other models in this process; see `practicum.ports.Backend`."""

    def __init__(self, config: Config, context: BackendContext) -> None:
        self._config = config
        self._context = context

    def student(self, config: StudentConfig) -> Learner:
        """Make adapters; their first values are those of `student.lora` here, seed for seed."""
        base, lora = config.model, config.lora
        assert isinstance(base, str) and lora is not None, (
            "the recipe was held against what the backend refuses"
        )
        context = self._context
        log.info(f"student: {base}")
        connection = Connection(self._config, "backend")
        context.at_end.callback(connection.close)

        def begin(service):  # type: ignore[no-untyped-def]
            return service.create_lora_training_client(
                base_model=base, rank=lora.rank, seed=context.seed, train_unembed=False
            )

        trainer = ServiceTrainer(connection, base, begin, explain_unsupported, context.meter)
        renderer = _renderer(self._config.tokenizer or trainer.tokenizer(), config)
        trainer.vocabulary = renderer.vocab_size
        trainer.special_ids = renderer.special_ids
        return Learner(
            trainer=trainer,
            renderer=renderer,
            context_length=trainer.context_length() or UNKNOWN_CONTEXT,
            source=f"{base} (rank {lora.rank})",
        )

    def scorer(self, config: ScorerConfig, name: str) -> Model:
        """Load the model into this process."""
        return self._context.local().scorer(config, name)

    def sampler(self, student: Learner) -> StudentClient:
        """Sample from the student's weights, which are published once a step."""
        return StudentClient(_own(student).sampling_client)

    def self_teacher(self, student: Learner, rule: WeightUpdateRule, name: str) -> StudentClient:
        """Score with the student's live weights, or with those it began with, which are the base model's."""
        if rule.weights not in ("live", "frozen"):
            raise CapabilityError(
                f"teacher.weights {rule.weights!r} averages or copies the student's weights, which backend 'tinker' does not "
                "hold; write weights: frozen or live"
            )
        if rule.weights == "live":
            return self.sampler(student)
        base = _own(student).base_client()
        return StudentClient(lambda: base)

    def save(self, student: Learner, folder: Path) -> None:
        """Save at the service, and write down the address."""
        for stem, tensors in _own(student).save_state().items():
            write_tensors(folder / f"{stem}.safetensors", tensors)

    def load(self, student: Learner, folder: Path, *, moments: bool = True) -> None:
        """Let the service go back to what was saved there; the moments are there too, and asked for or not."""
        optimizer = read_tensors(folder / "optimizer.safetensors") if moments else {}
        _own(student).load_state(
            {"student": read_tensors(folder / "student.safetensors"), "optimizer": optimizer}
        )

    def export(self, student: Learner, folder: Path) -> None:
        """Refuse: the weights are at the service."""
        raise CheckpointError(
            f"the student is at a service, {student.source}, and its weights are not here; ask the service"
        )


def _own(student: Learner) -> ServiceTrainer:
    assert isinstance(student.trainer, ServiceTrainer), (
        "a backend is given the students that it made"
    )
    return student.trainer


def _renderer(tokenizer: str, student: StudentConfig) -> Renderer:
    """Return how the student reads prompts."""
    settings = ModelConfig(
        model=tokenizer,
        template=student.template,
        system=student.system,
        thinking=student.thinking,
        stop=student.stop,
    )
    try:
        return load_renderer(settings)
    except ModelError as error:
        raise ModelError(
            f"{error} (the tokenizer of the student; write backend.tokenizer: a folder or a hub name)"
        ) from None
