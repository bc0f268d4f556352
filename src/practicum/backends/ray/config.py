"""The settings of the processes of a Ray cluster."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from practicum.backends._sharded.config import ShardedConfig
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Objective


class Config(ShardedConfig):
    """The processes of a cluster, and the memory limits of each process."""

    not_compared: ClassVar[frozenset[str]] = ShardedConfig.not_compared | {
        "samplers",
        "teachers",
        "teacher_shards",
        "restarts",
    }
    """Settings that may change when a run is resumed: they only change rounding."""
    type: Literal["ray"] = "ray"
    samplers: int = Field(
        default=1,
        ge=1,
        description="processes that sample with the student's weights; one GPU each",
    )
    teachers: Annotated[int, Field(ge=1)] | Literal["beside"] = Field(
        default=1,
        description="processes of each teacher, which share its requests; one GPU each; beside: "
        "sharded over the trainers' processes, without a separate GPU",
    )
    teacher_shards: int = Field(
        default=1,
        ge=1,
        description="processes that share one copy of a teacher in shards; with more than one, "
        "the teacher only scores",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        description="automatic resumes of a run from its newest checkpoint after a trainer was lost",
    )

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        if self.teachers == "beside":
            if self.teacher_shards > 1:
                raise ValueError(
                    "teachers: beside uses as many shards as the student; leave teacher_shards out"
                )
        elif self.teachers % self.teacher_shards:
            raise ValueError(
                f"{self.teachers} processes of a teacher cannot be divided into groups of "
                f"{self.teacher_shards} shards; set teachers: {self.teacher_shards}"
            )
        return self

    def problems(
        self,
        student: StudentConfig,
        objective: Objective,
        mixes_tokens: bool,
        staleness: int,
        models: Mapping[str, ScorerConfig],
    ) -> list[str]:
        """List the recipe settings that a cluster does not support, each with a replacement."""
        problems = super().problems(student, objective, mixes_tokens, staleness, models)
        problems += [
            f"{place}.residency: 'shared' keeps one base for several models of a process, and "
            "backend 'ray' gives each model separate processes; leave residency out"
            for place, model in models.items()
            if model.residency == "shared"
        ]
        if not self.are_teachers_sharded:
            return problems
        for place, model in models.items():
            if model.residency not in ("resident", "shared"):
                problems.append(
                    f"{place}.residency: {model.residency!r} moves a whole model, and backend 'ray' "
                    "keeps this one in shards; leave residency out"
                )
            if model.quantization is not None:
                problems.append(
                    f"{place}.quantization: {model.quantization!r} rounds a whole model, and backend "
                    "'ray' keeps this one in shards; leave quantization out, or write "
                    "teacher_shards: 1"
                )
        return problems

    @property
    def are_teachers_sharded(self) -> bool:
        """True if a process holds a part of each teacher."""
        return self.teachers == "beside" or self.teacher_shards > 1

    def list_smaller(self, missing: int) -> list[str]:
        """Return overrides for training with `missing` fewer GPUs; empty if that is not possible.

        The size of shards changes only if necessary.
        """
        most, share = self.trainers - missing, self.trainers // self.nodes
        if most < 1:
            return []
        nodes = max(most // share, 1)
        trainers = f"backend.trainers={min(most, nodes * share)}"
        return [trainers, f"backend.nodes={nodes}"] if self.nodes > 1 else [trainers]
