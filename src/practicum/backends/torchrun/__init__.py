"""The backend `torchrun`: processes that torch's own launcher starts learn and sample together.

See docs/clusters.md.
"""

from contextlib import AbstractContextManager

from practicum.backends.torchrun.config import Config
from practicum.core.plugins import load_plugin
from practicum.ports import Backend, BackendContext
from practicum.ports.paper import PaperBackend

__all__ = ["Config", "build", "build_on_paper", "join"]


def join(config: Config) -> AbstractContextManager[bool]:
    """Meet the processes that torchrun started; see `practicum.runs.opening.join_processes`."""
    from practicum.backends.torchrun.lockstep import join_processes

    return join_processes(config)


def build(config: Config, context: BackendContext) -> Backend:
    """Open the backend over the processes of this run; without a run, the local one."""
    from practicum.backends.torchrun.lockstep import Membership
    from practicum.backends.torchrun.rank_backend import RankBackend, note_single

    if Membership.group is None:
        note_single()
        single = config.build_single()
        return load_plugin("backends", single.type).build(single, context)
    return RankBackend(config, context, Membership.group)


def build_on_paper(config: Config, context: BackendContext, answer_tokens: int) -> PaperBackend:
    """Open the local backend over weightless models: the plan is that of one process."""
    single = config.build_single()
    return load_plugin("backends", single.type).build_on_paper(single, context, answer_tokens)
