"""`practicum probe`: what a server can give as a teacher."""

from typing import Any

from pydantic import ValidationError

from practicum.errors import RecipeError
from practicum.teachers._probe import Probe, probe
from practicum.teachers.openai_api import Config, client_of

LARGEST_K = 256
"""More candidates are not tried."""


def probe_server(url: str, **fields: Any) -> Probe:
    """What the server at an address can do; `fields` are those of an `openai_api` teacher."""
    try:
        config = Config(url=url, give_up_after=5.0, **fields)
    except ValidationError as error:
        raise RecipeError(
            [str(entry["msg"]).removeprefix("Value error, ") for entry in error.errors()]
        ) from None
    return probe(client_of(config), config.dialect, config.model, LARGEST_K, None)


def as_data(found: Probe) -> dict[str, object]:
    """The same for machines."""
    return {
        "model": found.model,
        "models": list(found.models),
        "dialect": "chat" if found.dialect is None else found.dialect.name,
        "sampled": found.dialect is not None,
        "largest_k": found.largest_k,
        "context": found.context,
        "follows_temperature": found.tempered,
        "noise_alone": found.noise[0],
        "noise_in_company": found.noise[1],
        "token_ids": found.token_ids,
        "seconds": found.seconds,
        "canary": found.mark,
    }
