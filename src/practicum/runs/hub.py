"""Push a folder to the Hugging Face hub through its own client.

The token comes from the client's usual places (`HF_TOKEN`, `hf auth login`) and is never shown.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from practicum.errors import ResourceError
from practicum.text.safe import excerpt

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

log = logging.getLogger(__name__)

ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that is valid",
    403: "the token may not write there: use a token with write access to this name",
    404: "there is no such user or organisation",
    429: "too many requests: try again later",
}
"""The advice for an answer of the hub, by its status."""


def create_repository(name: str, *, private: bool) -> None:
    """Create the model's repository if it does not exist; raises ResourceError if it cannot be."""
    from huggingface_hub import HfApi, get_token

    with _report_problems(name):
        if get_token() is None:
            raise ResourceError(f"{name}: not logged in to the hub; {ADVICE[401]}")
        HfApi().create_repo(name, private=private, exist_ok=True)


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder's files in one commit and return the repository's address.

    Raises ResourceError if the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    log.info(f"uploading {folder} to {name}")
    with _report_problems(name):
        commit = HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload with practicum"
        )
        return str(commit.repo_url)


@contextmanager
def _report_problems(name: str) -> Iterator[None]:
    """Turn errors of the hub's client into ResourceError of one line, without the token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except ResourceError:
        raise
    except HFValidationError as error:
        raise ResourceError(f"--push-to-hub {name}: {excerpt(str(error))}") from None
    except OfflineModeIsEnabled:
        raise ResourceError(
            f"{name}: the hub's client is offline (HF_HUB_OFFLINE); unset it to push"
        ) from None
    # For a failed connection, the client raises errors of its HTTP library, which differs by version.
    except Exception as error:
        refusal = _find_refusal(error)
        if refusal is None:
            reason = excerpt(str(error.__cause__ or error) or type(error).__name__, get_token())
            raise ResourceError(
                f"{name}: the hub cannot be reached ({reason}); check the network and HF_ENDPOINT"
            ) from None
        status = refusal.response.status_code
        reason = excerpt(refusal.server_message or "no reason given", get_token())
        advice = ADVICE.get(status, "try again later")
        raise ResourceError(f"{name}: the hub answered {status} ({reason}); {advice}") from None


def _find_refusal(error: BaseException | None) -> "HfHubHTTPError | None":
    """Return the hub's answer behind an error: for uploads, the client wraps it in further errors."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error
