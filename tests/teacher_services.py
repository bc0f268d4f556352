"""Services of a run for its teachers, as functions."""

from collections.abc import Callable
from typing import Any

from practicum.ports import (
    Model,
    SelfTeacher,
    Teacher,
    TeacherContext,
    TeacherServices,
    WeightUpdateRule,
)
from practicum.text import Renderer


def refuse(*_: Any) -> Any:
    raise AssertionError("this teacher loads nothing")


class Functions(TeacherServices):
    """Calls a function for each service."""

    def __init__(
        self,
        load_self: Callable[[WeightUpdateRule], SelfTeacher] = refuse,
        load_model: Callable[[Any], Model] = refuse,
        load_renderer: Callable[[Any], Renderer] = refuse,
        build: Callable[[TeacherContext, Any], Teacher] | None = None,
    ) -> None:
        self._load_self, self._load_model, self._load_renderer = (
            load_self,
            load_model,
            load_renderer,
        )
        self._build = build

    def build_teacher(self, context: TeacherContext, config: Any) -> Teacher:
        if self._build is not None:
            return self._build(context, config)
        return super().build_teacher(context, config)

    def load_self(self, rule: WeightUpdateRule, path: str) -> SelfTeacher:
        return self._load_self(rule)

    def load_model(self, config: Any, path: str) -> Model:
        return self._load_model(config)

    def load_renderer(self, config: Any, path: str) -> Renderer:
        return self._load_renderer(config)
