"""Collect the rollouts of a step from its source, and reward them.

A completion depends only on (seed, step, prompt, number), never on its batch.
"""

from collections.abc import Sequence

from practicum.core.waits import show_wait
from practicum.errors import CapabilityError, DataError
from practicum.ports import OpensEpisodes, SamplingClient, Task, Teacher
from practicum.ports.gate import ask_reward, call_part, report_rejections
from practicum.rollouts.batch import RolloutBatch, list_all_keys
from practicum.rollouts.drafts import is_replay
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.source import RolloutWriters, SourceConfig, SourceParts
from practicum.text import Renderer
from practicum.types import Rollout, SamplingParams


def collect_rollouts(
    batch: RolloutBatch, source: SourceConfig, writers: RolloutWriters, params: SamplingParams
) -> list[Rollout]:
    """Return the completions of a batch from its source.

    `policy_version` of a rollout counts the optimizer steps behind the student that sampled it.
    """
    is_conversation = writers.environment is not None
    if problem := source.explain_form(is_conversation=is_conversation):
        raise CapabilityError(problem)
    sampler = RolloutSampler(batch, writers.renderer, params, writers.environment)
    keys, parts = list_all_keys(batch), SourceParts(sampler, writers)
    label = f"rollout.source: {source.name}"
    rollouts = call_part(source, label, lambda: source.collect(keys, parts))
    if not isinstance(rollouts, list) or not all(
        isinstance(rollout, Rollout) for rollout in rollouts
    ):
        raise DataError(f"{label}: collect returns no list of rollouts; return one for each key")
    if not rollouts:
        raise DataError(
            f"{label}: collect returned no rollouts for {len(keys)} keys; return at least one"
        )
    return rollouts


def sample_rollouts(
    batch: RolloutBatch,
    client: SamplingClient,
    renderer: Renderer,
    params: SamplingParams,
    environment: OpensEpisodes | None = None,
) -> list[Rollout]:
    """Return the student's completions of a batch, or its conversations with an environment."""
    sampler = RolloutSampler(batch, renderer, params, environment)
    return sampler.sample_student(list_all_keys(batch), client)


def sample_teacher_rollouts(
    batch: RolloutBatch,
    teacher: Teacher,
    renderer: Renderer,
    params: SamplingParams,
    environment: OpensEpisodes | None = None,
) -> list[Rollout] | None:
    """Return the teacher's completions or conversations, or None if it cannot generate."""
    sampler = RolloutSampler(batch, renderer, params, environment)
    return sampler.sample_teacher(list_all_keys(batch), teacher)


def add_rewards(rollouts: Sequence[Rollout], task: Task) -> list[Rollout]:
    """Return the rollouts with the task's rewards; a replay of drafts is no answer and has none."""
    rewarded = []
    with report_rejections(), show_wait("rewards", len(rollouts)) as wait:
        for rollout in rollouts:
            # Some sources, such as a search, have already asked the verifier.
            if rollout.reward is None and not is_replay(rollout):
                rollout = ask_reward(task, rollout)
            rewarded.append(rollout)
            wait.advance()
    return rewarded
