"""Load, sample from, train and save models in this process."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from practicum.backends.local.config import Config
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.drafter import DrafterTrainer
from practicum.backends.local.drafter_student import (
    export_drafter,
    measure_drafter,
    open_drafter,
    sample_with_drafter,
)
from practicum.backends.local.engine import open_engine_trainer
from practicum.backends.local.export import export
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import (
    LoadedModel,
    add_pictures,
    load,
    load_shared,
    load_student,
    locate_source,
)
from practicum.backends.local.native import name_decoding, name_ways
from practicum.backends.local.precision import name_dtype
from practicum.backends.local.residency import build_scorer
from practicum.backends.local.scalar_head import LocalScalarModel
from practicum.backends.local.scratch import prepare_scratch_folder
from practicum.backends.local.self_teacher import LocalSelfTeacher
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.backends.local.trainer import LocalTrainer
from practicum.engine_service.engine_trainer import EngineTrainer
from practicum.errors import RecipeError
from practicum.models.config import (
    DrafterConfig,
    ModelConfig,
    ScorerConfig,
    ScratchConfig,
    StudentConfig,
)
from practicum.models.digests import ModelRecord, record_model
from practicum.models.sources import needs_conversion
from practicum.models.tensors import copy_to_host, read_parts, write_stems
from practicum.ports import (
    Backend,
    BackendContext,
    LoadedScalar,
    Model,
    SamplingClient,
    Student,
    WeightUpdateRule,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStudent(Student):
    """A student with its modules in this process."""

    local_trainer: LocalTrainer
    """The trainer of the modules; `trainer` is the same object or samples with an engine."""
    loaded: LoadedModel
    engine_trainer: EngineTrainer | None = None


class LocalBackend(Backend):
    """See `practicum.ports.Backend`."""

    def __init__(self, config: Config, context: BackendContext) -> None:
        self._context = context
        self._config = config
        self._bases: dict[tuple[object, ...], LanguageModel] = {}

    def load_student(self, config: StudentConfig) -> LocalStudent:
        """Load the student and make the weights that the recipe names trainable."""
        folder = prepare_folder(config, "student", self._context)
        record = record_files(config, folder, self._context)
        if config.drafter is not None:
            loaded = load(config, folder, self._config.decoding)
            return self._load_drafter(config.drafter, loaded, record)
        loaded = load_student(config, self._context.seed, folder, self._config.decoding)
        choice = self._context.engine
        if choice is not None and choice.config.may_decline and self._context.pictures:
            choice = None  # engines read no pictures here
        if choice is None:
            loaded = self._add_pictures(loaded)
        model = loaded.language_model
        note_noise(config, loaded)
        limits = build_limits(model.device, self._config)
        trainer = LocalTrainer(model, limits, loaded.renderer.special_ids, dropout=config.dropout)
        by_engine, decoding = None, name_decoding(model)
        if choice is not None:
            by_engine = open_engine_trainer(trainer, loaded, choice, self._context)
        return LocalStudent(
            trainer=by_engine or trainer,
            local_trainer=trainer,
            engine_trainer=by_engine,
            renderer=loaded.renderer,
            context_length=loaded.context_length,
            source=loaded.source,
            dims=measure_dims(model),
            trainable_dims=measure_trainable(model),
            weights=model.trainable_parameters(),
            decoding=decoding if by_engine is None else name_ways(by_engine.engine_name, decoding),
            state_bytes=trainer.state_bytes,
            loaded=loaded,
            record=record and record.confirm(),
            dtype=name_dtype(model),
        )

    def _load_drafter(
        self, config: DrafterConfig, loaded: LoadedModel, record: ModelRecord | None
    ) -> LocalStudent:
        """Return the drafter of a loaded target as the student."""
        model, renderer = loaded.language_model, loaded.renderer
        drafter, limits = (
            open_drafter(loaded, config, self._context),
            build_limits(model.device, self._config),
        )
        trainer = DrafterTrainer(model, drafter, config, limits, renderer.special_ids)
        return LocalStudent(
            trainer=trainer,
            local_trainer=trainer,
            renderer=renderer,
            context_length=loaded.context_length,
            source=loaded.source,
            dims=measure_dims(model),
            trainable_dims=measure_drafter(drafter, config.depth),
            weights=dict(drafter.named_parameters(prefix="drafter")),
            decoding=name_decoding(model),
            state_bytes=trainer.state_bytes,
            loaded=loaded,
            record=record and record.confirm(),
            dtype=name_dtype(model),
        )

    def load_scorer(self, config: ScorerConfig, name: str) -> Model:
        """Load a model that only scores and samples; `config.residency` places its weights."""
        folder, decoding = prepare_folder(config, name, self._context), self._config.decoding
        record = record_files(config, folder, self._context)
        if config.residency == "shared":
            loaded = load_shared(config, self._bases, folder, decoding)
        else:
            loaded = load(config, folder, decoding)
        record, loaded = record and record.confirm(), self._add_pictures(loaded)
        model = loaded.language_model
        limits = build_limits(model.device, self._config)
        client = build_scorer(loaded, config, limits.sampling_batch, limits.chunk_tokens, record)
        return Model(
            client,
            loaded.renderer,
            loaded.context_length,
            loaded.source,
            measure_dims(model),
            model.no_sampling_reason,
            name_decoding(model),
            record,
            name_dtype(model),
        )

    def _add_pictures(self, loaded: LoadedModel) -> LoadedModel:
        """Return the model, which also reads pictures if the run's prompts have some.

        Without them, a vision-language model packs its texts as any other model does.
        """
        return add_pictures(loaded, self._config.decoding) if self._context.pictures else loaded

    def load_scalar(self, config: StudentConfig, name: str) -> LoadedScalar:
        """Load a body with one linear output, which is trained in addition to the student."""
        folder = prepare_folder(config, name, self._context)
        record = record_files(config, folder, self._context)
        loaded = load_student(config, self._context.seed, folder, self._config.decoding)
        model = loaded.language_model
        return LoadedScalar(
            LocalScalarModel(model, build_limits(model.device, self._config)),
            loaded.renderer,
            loaded.source,
            measure_dims(model),
            measure_trainable(model),
            record and record.confirm(),
            name_dtype(model),
        )

    def share_student(self, student: Student) -> LoadedScalar:
        """Return a linear output on the student's own body."""
        model = _require_local(student).local_trainer.language_model
        scalar = LocalScalarModel(model, build_limits(model.device, self._config), is_shared=True)
        dims, learning = measure_dims(model), measure_trainable(model)
        return LoadedScalar(scalar, student.renderer, student.source, dims, learning)

    def build_sampler(self, student: Student) -> SamplingClient:
        """Return a client of the live weights, with the recipe's engine or drafter if set."""
        local, drafts = _require_local(student), self._context.speculation
        if drafts is not None:
            live = local.local_trainer.build_sampling_client()
            return sample_with_drafter(live, local.loaded, drafts)
        return (local.engine_trainer or local.local_trainer).build_sampling_client()

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> LocalSelfTeacher:
        """Return a scorer that starts with the student's weights and follows them by `rule`."""
        return _require_local(student).local_trainer.build_self_teacher(rule)

    def save(self, student: Student, folder: Path) -> None:
        """Write the trainable weights and AdamW's moments."""
        write_stems(_require_local(student).local_trainer.save_state(), folder)

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        """Copy weights and moments to the host; return a function that writes the copy."""
        state = _require_local(student).local_trainer.save_state()
        return partial(
            write_stems, {stem: copy_to_host(tensors) for stem, tensors in state.items()}
        )

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        """Restore a saved checkpoint, without the moments if `moments` is False."""
        optimizer = read_parts(folder, "optimizer") if moments else {}
        local = _require_local(student)
        local.local_trainer.load_state(
            {"student": read_parts(folder, "student"), "optimizer": optimizer}
        )
        if local.engine_trainer is not None:
            local.engine_trainer.mark_changed()

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        """Write a model folder with the adapters merged, or only the adapters."""
        local = _require_local(student)
        if isinstance(local.local_trainer, DrafterTrainer):
            raise RecipeError(
                f"{folder.name}: the run trained a drafter, and its target is unchanged; export the "
                "drafter with --format speculators or --format sglang"
            )
        export(local.loaded, folder, adapter=adapter)

    def export_drafter(self, student: Student, folder: Path, layout: str) -> None:
        """Write a drafter's folder that an engine loads."""
        local = _require_local(student)
        trainer = local.local_trainer
        if not isinstance(trainer, DrafterTrainer):
            super().export_drafter(student, folder, layout)
            return
        export_drafter(local.loaded, trainer.drafter, trainer.config, folder, layout)


def prepare_folder(config: ModelConfig, name: str, context: BackendContext) -> Path | None:
    """Return the folder of a from-scratch model, None for other models; log what is loaded."""
    if isinstance(config.model, ScratchConfig):
        log.info(f"{name}: made from scratch")
        folder = context.models_dir / name.replace("/", "-")
        return prepare_scratch_folder(folder, config.model, context.task(), config.template)
    is_pending = needs_conversion(config.model)
    note = " (converting it to safetensors, once: about 20 s)" if is_pending else ""
    log.info(f"{name}: {config.model}{note}")
    return None


def record_files(
    config: ModelConfig, folder: Path | None, context: BackendContext
) -> ModelRecord | None:
    """Record the files of a model before it is loaded, or return None if the run records none."""
    return record_model(locate_source(config, folder)) if context.keeps_records else None


def _require_local(student: Student) -> LocalStudent:
    assert isinstance(student, LocalStudent), "a backend is given the students that it made"
    return student


def note_noise(config: StudentConfig, loaded: LoadedModel) -> None:
    """Log a note if the model's config asks for dropout and the recipe does not use it."""
    if not config.dropout and _is_noisy_in_training(loaded.language_model):
        log.info(
            f"student: the config of {loaded.source} asks for dropout or a router's noise in "
            "training, which is left off; set student.dropout: true to train with it"
        )


@torch.no_grad()
def _is_noisy_in_training(language_model: LanguageModel) -> bool:
    """Return True if the model's output on a short text differs in training mode."""
    model, device = language_model.model, language_model.device
    ids = torch.arange(1, 17, device=device)[None] % language_model.vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model.train()
        noisy = language_model.body(ids, mask)
        model.eval()
    return not torch.allclose(noisy, language_model.body(ids, mask), rtol=1e-3, atol=1e-4)
