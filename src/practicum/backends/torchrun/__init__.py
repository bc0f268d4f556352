"""The backend `torchrun`: processes started by torch's launcher that train and sample together.

See docs/clusters.md.
"""

from contextlib import AbstractContextManager

from practicum.backends.torchrun.config import Config
from practicum.core.plugins import load_plugin
from practicum.ports import Backend, BackendContext
from practicum.ports.paper import PaperBackend

__all__ = ["Config", "build", "build_on_paper", "join"]


def join(config: Config) -> AbstractContextManager[bool]:
    """Connect the processes that torchrun started; see `practicum.runs.opening.join_processes`."""
    from practicum.backends.torchrun.lockstep import join_processes

    return join_processes(config)


def build(config: Config, context: BackendContext) -> Backend:
    """Open the backend over the processes of this run, or the local backend without a run."""
    from practicum.backends.torchrun.lockstep import Membership
    from practicum.backends.torchrun.rank_backend import RankBackend, note_single

    if Membership.group is None:
        note_single()
        single = config.build_single()
        return load_plugin("backends", single.type).build(single, context)
    return RankBackend(config, context, Membership.group)


def build_on_paper(config: Config, context: BackendContext, answer_tokens: int) -> PaperBackend:
    """Open the local backend over weightless models; the plan is for one process."""
    single = config.build_single()
    return load_plugin("backends", single.type).build_on_paper(single, context, answer_tokens)
