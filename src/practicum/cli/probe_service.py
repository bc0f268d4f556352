"""`practicum probe` of a service that speaks the Tinker API, such as `practicum serve`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import yaml
from pydantic import BaseModel, ValidationError

from practicum.remote.http import JsonClient, JsonRequest, RequestRefused
from practicum.text import make_printable

MODELS, CAPABILITIES = "/v1/models", "/api/v1/get_server_capabilities"
"""The paths at which servers of OpenAI's API and of the Tinker API list their models."""

FIRST_SECONDS = 5.0
"""The seconds in which a server must begin its first answer; a second request gets as many."""


class _ModelRow(BaseModel):
    model_name: str
    max_context_length: int | None = None
    revision: str | None = None


class _ServiceDescription(BaseModel):
    supported_models: list[_ModelRow]
    server: str | None = None


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A model of a service: its name, context in tokens and revision, None if unknown."""

    name: str
    context: int | None
    revision: str | None


@dataclass(frozen=True, slots=True)
class ServiceProbe:
    """The models of a service, and the program that serves them (None if unknown)."""

    url: str
    server: str | None
    models: Sequence[ProbedModel]

    def render_lines(self) -> list[str]:
        """Return one fact per line, and the teacher of a recipe."""
        lines = [f"server: {make_printable(self.server or 'unknown')}, speaks the Tinker API"]
        for model in self.models:
            context = "unknown before the first request"
            if model.context is not None:
                context = f"{model.context} tokens"
            lines += [
                f"model: {make_printable(model.name)}",
                f"  revision: {make_printable(model.revision or 'unknown')}",
                f"  context: {context}",
            ]
        name = self.models[0].name if len(self.models) == 1 else "ONE OF THEM"
        return [
            *lines,
            "signals: sampled, topk(k, support=student), topk(k, support=teacher)",
            *render_teacher({"type": "tinker", "url": self.url, "model": name}),
        ]

    def to_json(self) -> dict[str, object]:
        """Return the result as JSON data."""
        return {"dialect": "tinker", **asdict(self)}


def render_teacher(settings: dict[str, object]) -> list[str]:
    """Return the lines of a recipe's teacher, to be pasted."""
    text = yaml.safe_dump({"teacher": settings}, sort_keys=False, allow_unicode=True)
    return ["", "# for a recipe:", *text.splitlines()]


def find_service(client: JsonClient, url: str) -> ServiceProbe | None:
    """Return the facts that a Tinker API service reports, or None if the server is not such a
    service.

    TeacherError if the server cannot be reached or does not answer in time.
    """
    try:
        client.ask(JsonRequest(MODELS, name="the list of models", seconds=FIRST_SECONDS))
        return None
    except RequestRefused as error:
        if error.status in (401, 403):
            raise
    try:
        request = JsonRequest(CAPABILITIES, name="what the server can do", seconds=FIRST_SECONDS)
        description = _ServiceDescription.model_validate(client.ask(request))
    except (RequestRefused, ValidationError):
        return None
    models = [
        ProbedModel(row.model_name, row.max_context_length, row.revision)
        for row in description.supported_models
    ]
    return ServiceProbe(url, description.server, models) if models else None
