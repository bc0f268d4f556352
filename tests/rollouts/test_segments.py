"""Long answers continue in a later step: the tokens equal an uninterrupted answer, each with its own policy."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import IN_SEGMENTS, assert_same_run, rows, toy_recipe, toy_run

from practicum.backends.local.drawing import (
    draw_exponentials,
    open_random_stream,
    open_request_stream,
)
from practicum.errors import CapabilityError, CheckpointError, RecipeError
from practicum.objective import Sampled
from practicum.ports import SamplingClient
from practicum.rollouts import RolloutBatch, Segments
from practicum.rollouts.sampling import RolloutSampler
from practicum.run_dir import RunDir
from practicum.runs.assembly import assemble_run
from practicum.runs.opening import open_student
from practicum.types import Message, Prompt, Sample, SampleRequest, SamplingParams, ScoreRequest


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    toy_run(models, folder, IN_SEGMENTS)
    return folder / "toy"


def test_without_a_limit_everything_is_as_without_segments(models, tmp_path):
    short = {**IN_SEGMENTS, "train.steps": 2}
    toy_run(models, tmp_path / "a", {**short, "rollout": {"n": 2, "max_new_tokens": 6}})
    unlimited = {"n": 2, "max_new_tokens": 6, "segment_tokens": 6}
    toy_run(models, tmp_path / "b", {**short, "rollout": unlimited})
    for name in ("rollouts.jsonl", "vocabulary.jsonl"):
        assert (tmp_path / "a/toy" / name).read_bytes() == (tmp_path / "b/toy" / name).read_bytes()
    more = {"tokens_carried": 0.0, "token_age": 0.0, "answers_open": 0.0}
    plain = [row | more for row in rows(tmp_path / "a/toy/metrics.jsonl")]
    assert rows(tmp_path / "b/toy/metrics.jsonl") == plain
    weights = [load_file(tmp_path / f"{run}/toy/checkpoints/step-2/student.safetensors") for run in "ab"]  # fmt: skip
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())


def test_a_student_that_does_not_change_writes_the_tokens_of_answers_in_one_piece(models, tmp_path):
    # The current student is its own teacher, so nothing is learned.
    frozen = {**IN_SEGMENTS, "teacher": {"type": "self", "weights": "live"}}
    toy_run(models, tmp_path / "pieces", frozen)
    toy_run(models, tmp_path / "whole", {**frozen, "rollout.segment_tokens": None})
    pieces, answers = (
        {(row["prompt"], row["sample"]): row for row in rows(tmp_path / run / "toy/rollouts.jsonl")}
        for run in ("pieces", "whole")
    )
    assert {1, 2} <= {len(row.get("versions", [0])) for row in pieces.values()}
    for key, row in pieces.items():
        assert row["tokens"] == answers[key]["tokens"]
        assert row["stop_reason"] == answers[key]["stop_reason"]
        assert row["sampling_logprobs"] == pytest.approx(
            answers[key]["sampling_logprobs"], abs=1e-5
        )


def test_each_token_has_the_log_probability_of_the_policy_that_sampled_it(whole):
    metrics, answers = rows(whole / "metrics.jsonl"), rows(whole / "rollouts.jsonl")
    by_version: dict[int, list[tuple[tuple[int, ...], int, float]]] = {}
    ages: dict[int, list[int]] = {}
    for row in answers:
        runs = row.get(
            "versions", [{"version": row["policy_version"], "tokens": len(row["tokens"])}]
        )
        versions = [run["version"] for run in runs for _ in range(run["tokens"])]
        assert row["policy_version"] == min(versions) and versions == sorted(versions)
        ages.setdefault(row["step"], []).extend(row["step"] - 1 - v for v in versions)
        for place, version in enumerate(versions):
            text = (*row["prompt_tokens"], *row["tokens"][:place])
            logprob = row["sampling_logprobs"][place]
            by_version.setdefault(version, []).append((text, row["tokens"][place], logprob))
    assert set(by_version) == {0, 1, 2, 3}
    backend, student = open_student(whole)
    for version, tokens in by_version.items():
        if version:
            backend.load(student, RunDir.open(whole).checkpoints / f"step-{version}", moments=False)
            requests = [ScoreRequest(text, (token,)) for text, token, _ in tokens]
            signals = backend.build_sampler(student).score(requests, Sampled())
            theirs = torch.cat(
                [signal.logprobs for signal in signals if signal.logprobs is not None]
            )
            mine = torch.tensor([logprob for _, _, logprob in tokens])
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)
    for row in metrics:
        mine = ages[row["step"]]
        assert row["token_age"] == pytest.approx(sum(mine) / len(mine))
        assert row["tokens_carried"] == pytest.approx(sum(age > 0 for age in mine) / len(mine))
    # Every started answer is trained on or waits.
    assert len(answers) + metrics[-1]["answers_open"] == 4 * 6 * 2
    assert metrics[-1]["tokens_carried"] > 0 < metrics[-1]["answers_open"]


def test_a_resumed_run_writes_the_same_bytes(models, whole, tmp_path):
    toy_run(models, tmp_path, {**IN_SEGMENTS, "train.steps": 2})
    toy_run(models, tmp_path, IN_SEGMENTS, resume=True, allow_changed=["train.steps"])
    assert_same_run(tmp_path / "toy", whole)


# Which answers continue


class Letters:
    """Renders prompts of one token."""

    opens_thoughts = False

    def render_all(self, prompts: Any) -> list[tuple[int, ...]]:
        return [(ord(messages[0].content),) for messages in prompts]

    def decode_all(self, answers: Any) -> list[str]:
        return ["".join(map(str, tokens)) for tokens in answers]


class Counting(SamplingClient):
    """Answers each prompt `x` with `lengths[x]` tokens and records the requests."""

    def __init__(self, **lengths: int) -> None:
        self.lengths, self.requests = lengths, []

    def sample(self, requests: Any, params: SamplingParams) -> list[Sample]:
        self.requests += requests
        samples = []
        for request in requests:
            left = self.lengths[chr(request.prompt_tokens[0])] - len(request.prompt_tokens) + 1
            count = min(left, params.max_new_tokens)
            values = torch.full((count,), -0.5)
            reason = "stop" if count == left else "length"
            samples.append(Sample(torch.arange(count), values, values, reason))
        return samples


def take_step(segments: Segments, client: Any, step: int, *names: str, n: int = 1) -> list[str]:
    prompts = [Prompt(name, (Message("user", name),)) for name in names]
    batch = RolloutBatch(prompts, n, 3, step)
    sampler: Any = RolloutSampler(batch, Letters(), SamplingParams(8), None)  # type: ignore[arg-type]
    return [
        f"{rollout.prompt.id}{len(rollout.tokens)}" for rollout in segments.collect(sampler, client)
    ]


def test_a_prompt_is_trained_on_once_all_of_its_answers_have_ended():
    segments, client = Segments(2), Counting(a=5, b=1, c=2)
    assert take_step(segments, client, 1, "a", "b") == ["b1"]
    assert take_step(segments, client, 2, "c") == ["c2"]
    # The later answer to the same prompt is a separate group, and waits until it ends.
    assert take_step(segments, client, 3, "a") == ["a5"]
    assert take_step(segments, client, 4, "b") == ["b1"]
    assert [len(answer.tokens) for answer in segments.waiting] == [4]
    assert segments.waiting[0].tokens.versions.tolist() == [2, 2, 3, 3]
    continued = [request for request in client.requests if request.continues is not None]
    assert [request.continues[1] for request in continued] == [2, 4, 2]
    assert len({request.seed for request in client.requests}) == len(client.requests)


def test_two_groups_of_one_prompt_do_not_meet_and_a_step_never_stays_empty():
    segments, client = Segments(2), Counting(a=7, b=3)
    # No answer ends within two tokens, so the step continues.
    assert take_step(segments, client, 1, "a", "b") == ["b3"]
    assert [len(answer.tokens) for answer in segments.waiting] == [4]
    client.lengths["a"] = 6
    assert take_step(segments, client, 2, "a") == ["a6"]
    client.lengths["a"] = 3
    assert take_step(segments, client, 3, "a") == ["a3"]
    assert [answer.step for answer in segments.waiting] == [3]
    assert take_step(segments, client, 4, "b") == ["a3"]


def test_an_answer_has_no_more_than_its_most_tokens():
    segments, client = Segments(3), Counting(a=20)
    assert take_step(segments, client, 1, "a") == ["a8"]
    assert [r.continues and r.continues[1] for r in client.requests] == [None, 3, 6]


def test_a_stream_goes_on_where_it_was():
    stream = open_random_stream(7)
    for _ in range(3):
        draw_exponentials([stream], 130)
    resumed = open_request_stream(SampleRequest((1,), 9, (7, 3)), 130)
    assert draw_exponentials([stream], 130).equal(draw_exponentials([resumed], 130))
    fresh = open_request_stream(SampleRequest((1,), 9), 130)
    assert draw_exponentials([fresh], 130).equal(draw_exponentials([open_random_stream(9)], 130))


def test_a_damaged_state_is_named():
    segments, client = Segments(2), Counting(a=5, b=1)
    take_step(segments, client, 1, "a", "b")
    (row,) = segments.save_state()
    with pytest.raises(CheckpointError, match="an unfinished answer is damaged"):
        segments.load_state([row], [])
    with pytest.raises(CheckpointError, match="an unfinished answer is damaged"):
        segments.load_state([{**row, "tokens": None}], [Prompt("a", (Message("user", "a"),))])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rollout.source": "teacher"}, "only the student's own answers continue"),
        ({"rollout.max_staleness": 1}, "segment_tokens continues answers with the newest weights"),
        ({"task": {"type": "walker"}}, "a conversation does not continue in a later step"),
    ],
)
def test_what_cannot_go_on_is_refused(models, tmp_path, changes, error):
    with pytest.raises((RecipeError, CapabilityError), match=error):
        assemble_run(toy_recipe(models, {**IN_SEGMENTS, **changes}), tmp_path)
