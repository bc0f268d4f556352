"""Turns of conversations as separate answers: the context, the reward and the loss of each turn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from toy import TASK, assert_same_run, forked, rows, toy_recipe, toy_run

from practicum.errors import CapabilityError
from practicum.rollouts import (
    RolloutBatch,
    RolloutWriters,
    SourceChoice,
    as_environment,
    collect_rollouts,
    sample_rollouts,
)
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import Message, Rollout, SamplingParams

SOURCE: TypeAdapter[Any] = TypeAdapter(SourceChoice)
USER = {"type": "user", "tries": 3, "right": "a", "wrong": "{answer}", "task": TASK}
TURNS = {
    "task": USER,
    "rollout": {"source": "turns", "max_new_tokens": 24},
    "evaluation": {"prompts": 2, "max_turns": 1},
    "teacher": {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "live"},
        "reference": "{next}",
    },
    "notes": {"next": {"type": "next_state"}},
}


@pytest.fixture(scope="module")
def parts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models, TURNS), tmp_path_factory.mktemp("models"))


def collect(parts: RunComponents, source: str, limit: int = 24) -> list[Rollout]:
    components = parts.parts
    environment = as_environment(components.task, components.renderer)
    writers = RolloutWriters(
        components.sampler,
        components.teacher,
        components.renderer,
        environment=environment,
        task=components.task,
    )
    batch = RolloutBatch(components.prompts[:6], 2, 0, 1)
    params = SamplingParams(limit, stop_ids=components.renderer.stop_ids)
    return collect_rollouts(batch, SOURCE.validate_python(source), writers, params)


def test_the_turns_of_a_conversation_are_its_tokens_each_after_those_before_it(
    parts: RunComponents,
) -> None:
    conversations, turns = collect(parts, "student"), collect(parts, "turns")
    counts = [len(conversation.replies) for conversation in conversations]
    assert len(turns) == sum(counts) and len(set(counts)) > 1
    left = iter(turns)
    for conversation in conversations:
        mine = [next(left) for _ in conversation.replies]
        assert [turn.text for turn in mine] == list(conversation.replies)
        assert [turn.prompt.id for turn in mine] == [
            f"{conversation.prompt.id}-turn-{number + 1}" for number in range(len(mine))
        ]
        assert {turn.sample for turn in mine} == {conversation.sample}
        whole = (*conversation.prompt_tokens, *conversation.tokens.tolist())
        said = [Message(turn.role, turn.text) for turn in conversation.turns]
        for place, turn in enumerate(mine):
            begun = (*turn.prompt_tokens, *turn.tokens.tolist())
            assert begun == whole[: len(begun)]
            told = [replace(message, tokens=()) for message in turn.prompt.messages]
            assert told == [*conversation.prompt.messages, *said[: 2 * place]]
            # The teacher reads the exact tokens, however the student spelled them.
            assert parts.parts.renderer.render(turn.prompt.messages) == turn.prompt_tokens
            start = len(turn.prompt_tokens) - len(conversation.prompt_tokens)
            for column in ("sampling_logprobs", "policy_logprobs"):
                part = getattr(conversation, column)[start : start + len(turn.tokens)]
                assert torch.equal(getattr(turn, column), part), "nothing of the user's is in it"
            assert turn.policy_logprobs.isfinite().all() and turn.authors is None


def test_a_turn_has_the_reply_as_its_note_the_reward_so_far_and_no_loss_without_a_reply(
    parts: RunComponents,
) -> None:
    turns = collect(parts, "turns", limit=20)
    task = parts.parts.task
    assert {turn.stop_reason for turn in turns} == {"stop", "length"}
    for turn in turns:
        # Reward of the single turn, as this user's task judges the last answer.
        assert turn.reward == task.reward(replace(turn, turns=()))
        reply = turn.notes.get("next_state")
        assert turn.loss_mask.all() if reply is not None else not turn.loss_mask.any()
        if reply is not None:
            assert reply == ("a" if turn.reward == 1.0 else turn.prompt.answer)
        else:
            assert turn.stop_reason == "length"


def test_single_answers_have_no_turns(parts: RunComponents) -> None:
    components = parts.parts
    writers = RolloutWriters(components.sampler, components.teacher, components.renderer)
    batch = RolloutBatch(components.prompts[:1], 1, 0, 1)
    with pytest.raises(CapabilityError, match="source: turns needs conversations"):
        collect_rollouts(batch, SOURCE.validate_python("turns"), writers, SamplingParams(4))


def test_an_evaluation_of_one_turn_is_of_first_answers(parts: RunComponents) -> None:
    components, settings = parts.parts, parts.evaluation
    assert settings is not None
    environment = as_environment(components.task, components.renderer)
    batch = RolloutBatch(components.prompts[:6], 2, 0, 1)
    # As in the evaluation except for the temperature: this student writes nothing without one.
    params = replace(settings.sampling, temperature=1.0)
    one, all_turns = (
        sample_rollouts(batch, components.sampler, components.renderer, chosen, environment)
        for chosen in (params, replace(params, max_turns=None))
    )
    assert [answer.replies for answer in one] == [answer.replies[:1] for answer in all_turns]
    assert any(len(answer.replies) > 1 for answer in all_turns)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_that_learns_from_turns_is_resumed_to_the_same_bytes(
    models: Path, tmp_path: Path, ahead: int
) -> None:
    changes = {**TURNS, "train.steps": 4, "train.checkpoint_every": 2}
    changes["rollout.max_staleness"] = ahead
    toy_run(models, tmp_path / "whole", changes)
    learned = rows(tmp_path / "whole" / "toy" / "rollouts.jsonl")
    assert {row["prompt"].rpartition("-turn-")[2] for row in learned} >= {"1", "2"}
    killed = tmp_path / "killed"
    env = {"PRACTICUM_FAULT": "update:3"}
    assert forked(lambda: toy_run(models, killed, changes), env) == 137
    toy_run(models, killed, changes, resume=True)
    assert_same_run(tmp_path / "whole" / "toy", killed / "toy")
