"""Replays of rejected drafts: where they begin, what has a loss, and at which depth."""

from dataclasses import replace

import pytest
import torch
from backends.tiny import hidden_signal, rollout

from practicum.backends.local.drafter import DrafterTrainer, unroll
from practicum.methods.draft_opd.drafts import Config, _replay, find_errors
from practicum.objective import Objective
from practicum.rollouts import add_rewards
from practicum.rollouts.drafts import is_replay, measure_drafts, read_depths
from practicum.rows import PromptSet
from practicum.training.loop import measure_rollouts
from practicum.types import Datum, DraftRound, Prompt

from .small import make_drafter, make_target
from .test_training import LIMITS, gradients


def test_a_replay_follows_the_drafts_after_the_text_before_them() -> None:
    text = replace(rollout(3, 3, 1), rounds=(DraftRound(1, (7, 8, 9, 6), 1),))
    (part,) = text.rounds
    replay = _replay(text, part)
    assert replay.prompt_tokens == text.prompt_tokens
    assert replay.tokens.tolist() == [int(text.tokens[0]), 7, 8, 9, 6]
    # 7 is accepted, and the text itself has the state at which 8 was rejected.
    assert replay.loss_mask.tolist() == [False, False, False, True, True]
    assert is_replay(replay) and not is_replay(text)
    assert read_depths(replay).tolist() == [-1, 0, 1, 2, 3]
    assert Config.measure([text, replay]) == {"drafts/replay_share": 2 / 5}
    assert measure_drafts([text, replay]) == measure_drafts([text])


def test_drafts_after_the_end_of_a_text_were_not_rejected() -> None:
    rounds = [DraftRound(0, (7, 8, 9, 6), accepted) for accepted in range(5)]
    text = replace(rollout(3, 3, 1), rounds=tuple(rounds))
    # Three accepted drafts end the text; after two, the last one may be followed by its error.
    assert find_errors(text) == rounds[:3]


def test_a_replay_is_no_answer() -> None:
    text = replace(
        rollout(3, 3, 1), rounds=(DraftRound(1, (7, 8, 9, 6), 1),), text="abc", reward=None
    )
    replay = _replay(text, text.rounds[0])
    asked: list[str] = []

    def grade(reply: str, prompt: Prompt) -> float:
        asked.append(reply)
        return 1.0

    graded = add_rewards([text, replay], PromptSet((), (text.prompt,), grade=grade))
    assert asked == ["abc"] and [row.reward for row in graded] == [1.0, None]
    together, alone = (
        measure_rollouts(rows, [1] * len(rows), 1, Config()) for rows in (graded, graded[:1])
    )
    for name in ("length", "truncated", "empty", "reward"):
        assert together[name] == alone[name]


def test_a_replayed_token_learns_from_the_state_that_drafted_it() -> None:
    """Reverse KL at depth 2 and 3 of the row before the drafts, for any `states`."""
    target = make_target()
    drafter, config = make_drafter(target, 64, depth=4, decay=0.7)
    text = replace(rollout(3, 8, 1), rounds=())
    replay = _replay(text, DraftRound(2, (7, 8, 9, 6), 1))
    objective = Objective(signal="full", divergence="reverse_kl")
    trainer = DrafterTrainer(target, drafter, config, LIMITS)
    trainer.forward_backward([Datum(replay, hidden_signal(target, replay))], objective, 0)
    ours = gradients(drafter)
    ids = torch.tensor([[*replay.prompt_tokens, *replay.tokens.tolist()]])
    with torch.no_grad():
        output = target.model(ids, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer] for layer in drafter.layers], -1)
    row = len(replay.prompt_tokens) + 2 - 2
    states = list(unroll(drafter, target.model, features, ids, 4))
    loss = torch.zeros(())
    for depth in (2, 3):
        student = drafter.head.logprobs(drafter.finish(states[depth][0, row]))
        teacher = output.logits[0, row + 1 + depth].log_softmax(-1)
        loss = loss + 0.7**depth * (student.exp() * (student - teacher)).sum() / 2
    loss.backward()
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5)


def test_the_number_of_errors_is_not_negative() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Config(errors=-1)
