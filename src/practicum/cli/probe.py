"""`practicum probe`: find out which signals a server can give as a teacher."""

from typing import Any

from pydantic import ValidationError

from practicum.errors import RecipeError
from practicum.objective import Capabilities
from practicum.studies.doctor import AllowedMethods, find_allowed_methods
from practicum.teachers._probe import Probe, probe
from practicum.teachers._served import open_server
from practicum.teachers.openai_api import Config

LARGEST_K = 256
"""The largest k that is tried."""


def probe_server(url: str, **fields: Any) -> Probe:
    """Probe the server at an address; `fields` are settings of an `openai_api` teacher."""
    try:
        # Somebody waits at the terminal: an address that does not answer is reported soon.
        config = Config(url=url, give_up_after=5.0, **fields)
    except ValidationError as error:
        raise RecipeError(
            [str(entry["msg"]).removeprefix("Value error, ") for entry in error.errors()]
        ) from None
    return probe(open_server(config), config.dialect, config.model, LARGEST_K, None)


def find_methods(result: Probe) -> AllowedMethods:
    """Return the published methods that the server allows as a teacher, with a verifier."""
    if result.dialect is None:
        return find_allowed_methods(Capabilities(frozenset(), frozenset(), largest_k=0))
    if not result.largest_k:
        return find_allowed_methods(Capabilities(frozenset({"sampled"}), frozenset(), largest_k=0))
    signals = Capabilities(
        frozenset({"sampled", "topk"}), frozenset({"teacher"}), largest_k=result.largest_k
    )
    return find_allowed_methods(signals)


def to_json(result: Probe) -> dict[str, object]:
    """Return the probe's result as JSON data."""
    return {
        "model": result.model,
        "models": list(result.models),
        "dialect": "chat" if result.dialect is None else result.dialect.name,
        "sampled": result.dialect is not None,
        "largest_k": result.largest_k,
        "context": result.context,
        "follows_temperature": result.tempered,
        "noise_alone": result.noise[0],
        "noise_in_company": result.noise[1],
        "token_ids": result.token_ids,
        "seconds": result.seconds,
        "canary": result.canary_sum,
        "methods": find_methods(result).to_json(),
    }
