"""Traces of agents: read as conversations, learned from token for token, and refused by their line."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import make_model, rows, toy_run
from traced import node, talk, write

from practicum.errors import DataError
from practicum.models.config import ScorerConfig
from practicum.rollouts.sources.traces import load_traced_rollouts
from practicum.text import Renderer
from practicum.text.tokenizers import load_renderer
from practicum.text.trace_rows import add_reference_logprobs, read_traced_answers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


@pytest.fixture(scope="module")
def renderer(models: Path) -> Renderer:
    return load_renderer(ScorerConfig(model=str(models / "student")))


def test_a_trace_is_a_conversation_token_for_token(renderer: Renderer, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", talk(renderer))
    (answer,) = read_traced_answers(path)
    (rollout,) = load_traced_rollouts(path, [answer.prompt], renderer, 64)["a"]
    assert rollout.prompt_tokens == renderer.render(answer.prompt.messages)
    assert rollout.tokens.tolist() == [5, 6, 7, 8, 9, 3, 4, 6]
    assert rollout.loss_mask.tolist() == [True] * 3 + [False] * 3 + [True] * 2
    expected = torch.tensor([-0.1, -0.2, -0.3, 0.0, 0.0, 0.0, -0.1, -0.2])
    assert torch.equal(rollout.sampling_logprobs, expected)
    assert rollout.policy_logprobs.isnan().all() and rollout.reward == 1.25
    assert [(turn.role, turn.tokens, turn.text) for turn in rollout.turns] == [
        ("assistant", 3, "ab"),
        ("tool", 3, "result"),
        ("assistant", 2, "c"),
    ]
    assert rollout.text == "ab\nc" and rollout.stop_reason == "stop"
    assert rollout.mark_tokens_by("environment").tolist() == [
        not seen for seen in rollout.loss_mask
    ]


def test_lines_that_verifiers_wrote_are_read(renderer: Renderer) -> None:
    """Recorded with verifiers 0.4.0: two tasks, each answered in one turn."""
    path = Path(__file__).parents[1] / "verifiers_traces.jsonl"
    answers = read_traced_answers(path)
    recorded = load_traced_rollouts(path, [answer.prompt for answer in answers], renderer, 16)
    assert {name: row[0].tokens.tolist() for name, row in recorded.items()} == {
        "0": [7, 8, 2],
        "1": [9, 10, 2],
    }
    assert [rollouts[0].reward for rollouts in recorded.values()] == [1.0, 0.0]
    assert recorded["0"][0].sampling_logprobs.tolist() == [-0.5, -0.625, -0.75]


def test_each_path_that_may_be_learned_from_is_one_answer(
    renderer: Renderer, tmp_path: Path
) -> None:
    """Skip an attempt to shorten the history that was never continued, and a judge's trace."""
    forked = talk(renderer)
    forked["nodes"] += [
        node(0, "assistant", "b", [1, 5], 1),
        {
            **node(0, "assistant", "tried", [1, 6], 1),
            "semantic_parents": [{"node": 1, "type": "compaction_attempt"}],
        },
        node(None, "user", "other", [1, 2]),
        node(7, "assistant", "d", [1, 7], 1),
    ]
    path = write(
        tmp_path / "t.jsonl",
        forked,
        talk(renderer, agent={"trainable": False}),
        talk(renderer, task="b"),
    )
    answers = read_traced_answers(path)
    assert [(answer.line, answer.path, answer.prompt.id) for answer in answers] == [
        (1, (0, 1, 2, 3, 4), "a"),
        (1, (0, 5), "a"),
        (1, (7, 8), "a#2"),
        (3, (0, 1, 2, 3, 4), "b"),
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop_condition": "max_turns"}, "turns"),
        ({"is_timeout": True}, "timeout"),
        ({"errors": [{"type": "X", "message": "y"}]}, "error"),
        ({"stop_condition": None}, "stop"),
        ({"calls": [{"node": 3, "finish_reason": "length"}]}, "length"),
        ({"calls": [{"node": 1, "finish_reason": "length"}]}, "stop"),
    ],
)
def test_what_ended_a_trace_is_the_stop_reason(
    renderer: Renderer, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    (answer,) = read_traced_answers(write(tmp_path / "t.jsonl", talk(renderer, **fields)))
    assert answer.stop_reason == reason


def test_a_run_learns_from_traces_with_their_rewards(
    models: Path, renderer: Renderer, tmp_path: Path
) -> None:
    write(tmp_path / "t.jsonl", talk(renderer), talk(renderer, question="cab", task="b"))
    changes = {
        "task": {"type": "traces", "path": str(tmp_path / "t.jsonl")},
        "rollout.source": f"traces({tmp_path / 't.jsonl'})",
        "rollout.n": 1,
        "rollout.max_new_tokens": 16,
        "train.steps": 2,
        "train.prompts_per_step": 2,
        "evaluation.prompts": 0,
    }
    folder = toy_run(models, tmp_path, changes).folder
    recorded = rows(folder / "rollouts.jsonl")
    assert {row["prompt"]: row["tokens"] for row in recorded}["a"] == [5, 6, 7, 8, 9, 3, 4, 6]
    assert {row["reward"] for row in recorded} == {1.25}
    assert all(math.isfinite(row["loss"]) for row in rows(folder / "metrics.jsonl"))


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another schema": (lambda data: data.update(version=2), "version"),
    "fewer in the mask": (lambda data: data["nodes"][1]["mask"].pop(), "4 token_ids and 3 in mask"),
    "fewer log-probabilities": (
        lambda data: data["nodes"][1]["logprobs"].pop(),
        "3 tokens were sampled, 2 logprobs",
    ),
    "a later parent": (lambda data: data["nodes"][1].update(parent=4), "node 1 follows node 4"),
    "a picture": (
        lambda data: data["nodes"][0]["message"].update(
            content=[{"type": "image_url", "image_url": {"url": "x"}}]
        ),
        "nodes.0.message.content",
    ),
    "a token that is none": (
        lambda data: data["nodes"][0]["token_ids"].__setitem__(0, -1),
        "token_ids",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_line_that_is_no_trace_is_named(renderer: Renderer, tmp_path: Path, name: str) -> None:
    spoil, words = SPOILED[name]
    spoiled = talk(renderer)
    spoil(spoiled)
    path = write(tmp_path / "t.jsonl", talk(renderer), spoiled)
    with pytest.raises(DataError, match="line 2 is no trace of verifiers") as caught:
        read_traced_answers(path)
    assert words in str(caught.value) and str(caught.value).count("\n") == 0


def test_what_this_student_did_not_write_is_refused(renderer: Renderer, tmp_path: Path) -> None:
    other = talk(renderer)
    other["nodes"][0]["token_ids"][0] += 1
    path = write(tmp_path / "t.jsonl", other)
    (answer,) = read_traced_answers(path)
    with pytest.raises(DataError, match="line 1: from token 0 on, the prompt of 'a' differs"):
        load_traced_rollouts(path, [answer.prompt], renderer, 64)
    with pytest.raises(DataError, match=r"has 8 tokens after its prompt; raise rollout\.max_new"):
        load_traced_rollouts(write(path, talk(renderer)), [answer.prompt], renderer, 7)
    with pytest.raises(DataError, match="no trace has tokens that a model sampled"):
        read_traced_answers(write(path, talk(renderer, agent={"trainable": False})))
    with pytest.raises(DataError, match="cannot be read"):
        read_traced_answers(tmp_path / "none.jsonl")


def test_the_teachers_numbers_stand_in_their_messages(renderer: Renderer, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", talk(renderer))
    (line,) = path.read_bytes().splitlines()
    scored = json.loads(add_reference_logprobs(line, {1: [-1.0, -2.0, -3.0], 3: [-4.0, -5.0]}))
    assert [each.pop("reference_logprobs", None) for each in scored["nodes"]] == [
        None,
        [-1.0, -2.0, -3.0],
        None,
        [-4.0, -5.0],
        None,
    ]
    assert scored == json.loads(line)
