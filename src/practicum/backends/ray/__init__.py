"""The backend `ray`: sharded trainers, samplers and teachers as processes of a Ray cluster.

See docs/clusters.md.
"""

import os

from practicum.backends.ray.config import Config
from practicum.core.plugins import load_plugin
from practicum.errors import RecipeError, suggest_install
from practicum.ports import Backend, BackendContext
from practicum.ports.paper import PaperBackend

__all__ = ["RAYS_PARAGRAPHS", "Config", "build", "build_on_paper"]

RAYS_PARAGRAPHS = "A worker died or was killed|has been marked dead because"
"""The beginnings of the messages that Ray prints about each process and machine that dies."""


def build(config: Config, context: BackendContext) -> Backend:
    """Connect to the cluster, or start one on this machine."""
    # The run's own message names the lost process.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RAYS_PARAGRAPHS)
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise RecipeError(
            f"backend 'ray' needs the package ray, which cannot be imported ({error}); "
            f"{suggest_install('ray')}"
        ) from None
    from practicum.backends.ray.cluster_backend import RayBackend

    return RayBackend(config, context)


def build_on_paper(config: Config, context: BackendContext, answer_tokens: int) -> PaperBackend:
    """Open the local backend over weightless models; the plan is for one process."""
    single = config.build_single()
    return load_plugin("backends", single.type).build_on_paper(single, context, answer_tokens)
