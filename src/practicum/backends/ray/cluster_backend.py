"""Start the processes of a run and provide clients for them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from practicum.backends._sharded.rank_verbs import ModelSettings, ProcessSettings
from practicum.backends.local.backend import prepare_folder, record_files
from practicum.backends.ray.calls import AnswerLimits
from practicum.backends.ray.clients import (
    ModelClient,
    ModelPool,
    RankGroup,
    RayScalar,
    RaySelfTeacher,
    RayTrainer,
    ShardedTeacher,
)
from practicum.backends.ray.config import Config
from practicum.backends.ray.placement import RETRIES, RayCluster, Starter
from practicum.backends.ray.processes import PACKAGES, ModelProcess, ScalarProcess, TrainerRank
from practicum.errors import CapabilityError, RecipeError
from practicum.models.config import ModelConfig, ScorerConfig, StudentConfig
from practicum.ports import (
    Backend,
    BackendContext,
    LoadedScalar,
    Model,
    Student,
    WeightUpdateRule,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayStudent(Student):
    """A student with its shards in the trainers."""

    trainer: RayTrainer
    samplers: ModelPool


class RayBackend(Backend):
    """See `practicum.ports.Backend`."""

    def __init__(self, config: Config, context: BackendContext) -> None:
        self._config = config
        self._context = context
        self._cluster = RayCluster(context.at_end, config.list_smaller, config.silence)
        self._trainers: RankGroup | None = None
        self._patience = AnswerLimits(
            config.patience,
            config.restarts,
            starting=config.start_patience,
            pulse=self._cluster.pulse,
        )
        self._settings = ProcessSettings.read(config, PACKAGES)

    def load_student(self, config: StudentConfig) -> RayStudent:
        """Start the trainers and the samplers; all of them load the student."""
        engine = self._context.engine
        if engine and (problems := engine.config.list_pool_problems(self._config.samplers)):
            raise RecipeError("; ".join(problems))
        # Check that all GPUs exist before a process starts, so that no process waits forever for a
        # GPU.
        settings = self._config
        self._cluster.announce(
            (settings.samplers, config),
            (settings.trainers, config),
            *((self._count_teachers(), teacher) for teacher in self._context.models),
            *((1, scalar) for scalar in self._context.scalars),
        )
        folder = prepare_folder(config, "student", self._context)
        model = ModelSettings(config, folder, "student", self._context.seed, engine)
        starter = self._reserve_pool(self._config.samplers, model)
        group = self._open_trainers(config)
        samplers = self._start_pool("sampler", self._config.samplers, model, starter)
        # The processes start in the meantime.
        record = record_files(config, folder, self._context)
        group.meet()
        facts = group.load("load", replace(model, record=record))[0]
        sampling = samplers.load(facts["record"])
        for note in dict.fromkeys([*facts.pop("notes"), *sampling["notes"]]):
            log.info(note)
        trainer = RayTrainer(group, samplers)
        facts |= {"decoding": sampling["decoding"]}
        return RayStudent(trainer=trainer, samplers=samplers, **facts)

    def load_scorer(self, config: ScorerConfig, name: str) -> Model:
        """Start the processes of a frozen model, or load it into the trainers' processes."""
        folder = prepare_folder(config, name, self._context)
        model = ModelSettings(config, folder, name)
        if self._config.are_teachers_sharded:
            return self._load_in_shards(model)
        count = self._count_teachers()
        pool = self._start_pool(name, count, model, self._reserve_pool(count, model))
        facts = pool.load(record_files(config, folder, self._context))
        for note in facts.pop("notes"):
            log.info(note)
        client = ModelClient(pool, _get_no_weights, facts["no_sampling_reason"])
        return Model(client=client, **facts)

    def load_scalar(self, config: StudentConfig, name: str) -> LoadedScalar:
        """Start the process of a trained model with one output per token."""
        folder = prepare_folder(config, name, self._context)
        model = ModelSettings(config, folder, name, self._context.seed)
        starter = self._cluster.reserve(
            ScalarProcess, 1, config, max_restarts=0, concurrency_groups={"watch": 1}
        )
        group = RankGroup(name, [starter.start(self._settings, model)], self._patience)
        facts = group.load("load", record_files(config, folder, self._context))[0]
        for note in facts.pop("notes"):
            log.info(note)
        return LoadedScalar(RayScalar(group), **facts)

    def _count_teachers(self) -> int:
        """Return the number of processes of each teacher that need a separate GPU."""
        count = self._config.teachers
        return 0 if count == "beside" else count

    def _load_in_shards(self, model: ModelSettings) -> Model:
        """Load a sharded frozen model, in the trainers' processes or in separate processes."""
        config, count = model.config, self._count_teachers()
        if self._config.teachers == "beside":
            group = self._open_trainers(config)
        else:
            copies = count // self._config.teacher_shards
            group = self._start_group(model.name, config, count, copies)
        record = record_files(config, model.folder, self._context)
        group.meet()
        client = ShardedTeacher(group, replace(model, record=record), self._context.meter)
        facts = client.load()
        for note in facts.pop("notes"):
            log.info(note)
        return Model(client=client, **facts)

    def _open_trainers(self, config: ModelConfig) -> RankGroup:
        """Start the trainers, unless loading the student or a teacher already started them."""
        if self._trainers is None:
            count, nodes = self._config.trainers, self._config.nodes
            self._trainers = self._start_group("trainer", config, count, nodes)
        return self._trainers

    def _start_group(self, title: str, config: ModelConfig, count: int, nodes: int) -> RankGroup:
        """Start processes with shards, which cannot be restarted one by one."""
        ranks = self._cluster.reserve(
            TrainerRank, count, config, max_restarts=0, concurrency_groups={"watch": 1, "write": 1}
        )
        processes = [
            ranks.start(title, rank, count, nodes, self._settings) for rank in range(count)
        ]
        return RankGroup(title, processes, self._patience)

    def _reserve_pool(self, count: int, model: ModelSettings) -> Starter:
        """Reserve the GPUs of processes that Ray restarts when one is lost."""
        return self._cluster.reserve(
            ModelProcess,
            count,
            model.config,
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
            concurrency_groups={"watch": 1},
        )

    def _start_pool(
        self, title: str, count: int, model: ModelSettings, starter: Starter
    ) -> ModelPool:
        """Start processes with the same model."""
        processes = [starter.start(self._settings, model) for _ in range(count)]
        # A group ends when one of its processes ends; only the processes of a pool are restarted on
        # another machine.
        patience = replace(self._patience, count_missing=self._cluster.count_missing)
        return ModelPool(title, processes, patience, self._context.meter)

    def build_sampler(self, student: Student) -> ModelClient:
        """Return a client that samples from the current weights at each call."""
        return _require_ray(student).trainer.build_sampling_client()

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> RaySelfTeacher:
        """Return a scorer with weights that follow the student's by `rule`, in shards."""
        ray_student = _require_ray(student)
        return RaySelfTeacher(ray_student.trainer, ray_student.samplers, rule, name)

    def save(self, student: Student, folder: Path) -> None:
        """Let every rank write its part of weights and moments."""
        _require_ray(student).trainer.group.ask("save", folder.absolute())

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        """Let every rank copy its part to its host; return a function that makes them write it."""
        group = _require_ray(student).trainer.group
        group.ask("copy_state")
        return lambda folder: group.ask_concurrently("write_concurrently", folder.absolute())

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        """Let every rank read its rows of a checkpoint from any number of ranks."""
        trainer = _require_ray(student).trainer
        trainer.group.ask("load_state", folder.absolute(), moments)
        trainer.forget_published()

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        """Raise an error: one process exports a checkpoint."""
        raise CapabilityError(
            "the student is sharded over other processes; write a checkpoint, then run practicum "
            "export RUN"
        )


def _get_no_weights() -> None:
    """Return None: a frozen model has its own weights."""


def _require_ray(student: Student) -> RayStudent:
    assert isinstance(student, RayStudent), "a backend is given the students that it made"
    return student
