"""Conversations with an environment: the author of each token, where they end, independence, and whole runs."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from toy import assert_same_run, curve, rows

from practicum.agents import FunctionEpisode
from practicum.core.abandon import Cancelled
from practicum.errors import CapabilityError, VerifierError
from practicum.objective import Full, Signal
from practicum.ports import (
    Capabilities,
    Episode,
    Observation,
    PromptedClient,
    SamplingClient,
    Task,
)
from practicum.recipe import parse_recipe
from practicum.rollouts import (
    RolloutBatch,
    RolloutWriters,
    SourceChoice,
    as_environment,
    collect_rollouts,
    sample_rollouts,
)
from practicum.rollouts.conversation import Conversation, run_conversations
from practicum.rollouts.openings import ConversationRequest
from practicum.runs import run
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.tasks.walker import ACTIONS, Walker
from practicum.teachers.expert import ExpertTeacher
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.training import loop
from practicum.training.evaluation import evaluate, evaluate_teacher
from practicum.types import (
    AUTHORS,
    Message,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
    Turn,
)

TOKENIZER = build_character_tokenizer("abc\n")
RENDERER = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
STOP = TOKENIZER.eos_token_id
PROMPTS = [Prompt(letter, (Message("user", letter),)) for letter in "abc"]
PARAMS = SamplingParams(30, stop_ids=RENDERER.stop_ids)
BLANK = 4
"""Encodes a question as the tokens of `<user>`, two letters and `<assistant>`."""


class Echo(Task):
    """Asks three times, each time with the last letter of the answer, twice."""

    def train_prompts(self) -> list[Prompt]:
        return PROMPTS

    def heldout_prompts(self) -> list[Prompt]:
        return []

    def reward(self, rollout: Rollout) -> float:
        return float(len(rollout.replies) == 3)

    def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
        return FunctionEpisode(
            lambda said: None if len(said) == 3 else 2 * (said[-1].strip() or "a")[-1]
        )


class Parrot(SamplingClient):
    """Replies with `turns` in order, by the number of earlier replies; its log-probabilities identify the call."""

    def __init__(self, *turns: str) -> None:
        self.turns = turns
        self.seen: list[SampleRequest] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(signals=frozenset())

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        self.seen += requests
        return [self._one(request, params) for request in requests]

    def _one(self, request: SampleRequest, params: SamplingParams) -> Sample:
        begins = TOKENIZER.convert_tokens_to_ids("<assistant>")
        turn = request.prompt_tokens.count(begins) - 1
        said = len(request.prompt_tokens) - 1 - request.prompt_tokens[::-1].index(begins)
        whole = [*RENDERER.encode(self.turns[turn]), STOP][
            len(request.prompt_tokens) - 1 - said - 0 :
        ]
        tokens = torch.tensor(whole[: params.max_new_tokens])
        logprobs = torch.full((len(tokens),), -1.0 - turn)
        return Sample(
            tokens, logprobs, 2 * logprobs, "stop" if len(tokens) == len(whole) else "length"
        )

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        raise NotImplementedError


class Dice(Parrot):
    """Replies with a draw from its seed."""

    def _one(self, request: SampleRequest, params: SamplingParams) -> Sample:
        draw, tokens = random.Random(request.seed), []
        while len(tokens) < params.max_new_tokens and STOP not in tokens:
            tokens.append(draw.choice([*RENDERER.encode("abc\n"), STOP]))
        known = torch.tensor([draw.random() for _ in tokens])
        return Sample(torch.tensor(tokens), known, known, "stop" if STOP in tokens else "length")


def held(
    client: Parrot, limit: int = 30, prompts: Sequence[Prompt] = PROMPTS[:1]
) -> list[Conversation]:
    openings = [
        ConversationRequest(prompt, PromptedClient(client, RENDERER.render(prompt.messages)), seed)
        for seed, prompt in enumerate(prompts)
    ]
    return run_conversations(openings, Echo(), RENDERER, replace(PARAMS, max_new_tokens=limit))


def pieces(conversation: Conversation) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(conversation.sample.tokens.tolist()))


def spoken_turns(conversation: Conversation) -> tuple[str, ...]:
    return tuple(turn.text for turn in conversation.turns if turn.role == "assistant")


def test_turn_by_turn_each_token_is_whose_it_is():
    (one,) = held(Parrot("ab", "c", ""))
    assert pieces(one) == "ab</s><user>bb<assistant>c</s><user>cc<assistant></s>"
    spoken = [1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert one.model_mask.long().tolist() == spoken
    assert one.sample.sampling_logprobs.tolist() == [-1, -1, -1, 0, 0, 0, 0, -2, -2, 0, 0, 0, 0, -3]
    policy = one.sample.policy_logprobs
    assert policy.isnan().tolist() == [not own for own in spoken] and policy[0] == -2
    assert (
        spoken_turns(one) == ("ab", "c", "")
        and one.text == "ab\nc\n"
        and one.sample.stop_reason == "stop"
    )


def test_the_next_turn_is_asked_after_the_very_tokens_so_far():
    client = Parrot("ab", "c", "")
    (one,) = held(client)
    prompt = RENDERER.render(PROMPTS[0].messages)
    tokens = tuple(one.sample.tokens.tolist())
    assert [request.prompt_tokens for request in client.seen] == [
        prompt,
        prompt + tokens[:7],
        prompt + tokens[:13],
    ]
    assert len({request.seed for request in client.seen}) == 3


def test_a_line_break_within_a_turn_is_a_space_in_the_text():
    (one,) = held(Parrot("a\nb", "c", "a"))
    assert spoken_turns(one) == ("a\nb", "c", "a") and one.text == "a b\nc\na"


@pytest.mark.parametrize(
    ("limit", "expected", "said"),
    [
        (1, "a", ("a",)),
        (2, "ab", ("ab",)),
        (3, "ab</s>", ("ab",)),
        (7, "ab</s>", ("ab",)),
        (8, "ab</s><user>bb<assistant>c", ("ab", "c")),
        (9, "ab</s><user>bb<assistant>c</s>", ("ab", "c")),
        (13, "ab</s><user>bb<assistant>c</s>", ("ab", "c")),
    ],
)
def test_what_does_not_fit_ends_the_conversation(limit, expected, said):
    (one,) = held(Parrot("ab", "c", ""), limit)
    assert (
        pieces(one) == expected and spoken_turns(one) == said and one.sample.stop_reason == "length"
    )
    assert len(one.model_mask) == len(one.sample.tokens) <= limit


def test_the_last_turn_may_fill_it():
    (one,) = held(Parrot("ab", "c", ""), 14)
    assert one.sample.stop_reason == "stop" and len(one.sample.tokens) == 14


def test_a_turn_that_is_longer_than_a_draw_goes_on():
    client = Parrot("abcabcabcab", "c", "a")
    (one,) = held(client, 15)
    assert [len(request.prompt_tokens) - 3 for request in client.seen] == [0, 8], (
        "8 tokens, then 4 of the 7 left"
    )
    assert spoken_turns(one) == ("abcabcabcab",) and pieces(one) == "abcabcabcab</s>"
    assert one.sample.stop_reason == "length", "no turn fits after it"


@pytest.mark.parametrize("limit", [5, 16, 23, 60])
def test_what_is_said_in_one_does_not_depend_on_the_others(limit):
    prompts = [PROMPTS[number % 3] for number in range(12)]
    together = held(Dice(), limit, prompts)
    for seed, (prompt, whole) in enumerate(zip(prompts, together, strict=True)):
        opening = ConversationRequest(
            prompt, PromptedClient(Dice(), RENDERER.render(prompt.messages)), seed
        )
        (alone,) = run_conversations(
            [opening], Echo(), RENDERER, replace(PARAMS, max_new_tokens=limit)
        )
        assert pieces(alone) == pieces(whole) and alone.turns == whole.turns
        assert alone.sample.sampling_logprobs.equal(whole.sample.sampling_logprobs)
    assert len({pieces(one) for one in together}) > 6


class Listener(Episode):
    """Replies with the number of messages received; raises the exception that `faults` lists for a turn."""

    def __init__(
        self, prompt: Prompt, seed: int, faults: dict[int, Exception], closed: list[str]
    ) -> None:
        self.prompt, self.seed, self.faults, self.closed, self.heard = (
            prompt,
            seed,
            faults,
            closed,
            0,
        )

    def step(self, turn: str) -> Observation:
        self.heard += 1
        if self.heard in self.faults:
            raise self.faults[self.heard]
        if self.heard == 3:
            return Observation(None, {"feedback": f"{turn} was last"})
        return Observation(Message("user", "c" * self.heard), {"heard": str(self.heard)})

    def close(self) -> None:
        self.closed.append(self.prompt.id)
        if 0 in self.faults:
            raise self.faults[0]


class Listeners(Echo):
    """An environment that fails in the conversations of some prompts."""

    def __init__(self, **faults: dict[int, Exception]) -> None:
        self.faults, self.closed, self.opened = faults, [], []

    def open(self, prompt: Prompt, seed: int) -> Episode:
        self.opened.append((prompt.id, seed))
        return Listener(prompt, seed, self.faults.get(prompt.id, {}), self.closed)


def listen(environment: Echo, client: Parrot | None = None, limit: int = 30) -> list[Conversation]:
    openings = [
        ConversationRequest(
            prompt,
            PromptedClient(client or Parrot("ab", "c", "a"), RENDERER.render(prompt.messages)),
            seed,
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    return run_conversations(openings, environment, RENDERER, replace(PARAMS, max_new_tokens=limit))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fault", "reason", "note"),
    [
        (ConnectionError("the line went dead"), "error", "ConnectionError: the line went dead"),
        (TimeoutError("no answer in 5 s"), "timeout", "TimeoutError: no answer in 5 s"),
        (ValueError("two\nlines"), "error", "ValueError: two lines"),
    ],
)
def test_an_episode_that_fails_in_its_third_turn_ends_its_own_conversation(fault, reason, note):
    environment = Listeners(b={3: fault})
    whole, broken, other = listen(environment)
    assert (broken.sample.stop_reason, broken.notes["error"]) == (reason, note)
    assert broken.sample.tokens.equal(whole.sample.tokens), "all that was said stays"
    assert (
        whole.sample.stop_reason == other.sample.stop_reason == "stop"
        and "error" not in whole.notes
    )
    assert sorted(environment.closed) == ["a", "b", "c"]


def test_an_episode_gives_notes_and_is_closed_once_when_it_is_over():
    environment = Listeners()
    for conversation in listen(environment):
        assert conversation.notes == {"heard": "2", "feedback": "a was last"}
        assert [(turn.role, turn.text) for turn in conversation.turns] == [
            ("assistant", "ab"), ("user", "c"), ("assistant", "c"), ("user", "cc"), ("assistant", "a")
        ]  # fmt: skip
        assert sum(turn.tokens for turn in conversation.turns) == len(conversation.sample.tokens)
    assert sorted(environment.closed) == ["a", "b", "c"]
    again = Listeners()
    listen(again)
    assert environment.opened == again.opened and len({seed for _, seed in again.opened}) == 3


def test_a_conversation_that_ends_in_its_first_turn_is_never_opened():
    environment = Listeners()
    assert {conversation.sample.stop_reason for conversation in listen(environment, limit=2)} == {
        "length"
    }
    assert environment.opened == environment.closed == []


def test_an_episode_that_cannot_be_closed_leaves_its_conversation_as_it_ended():
    _, broken, _ = listen(Listeners(b={0: OSError("still busy")}))
    assert broken.sample.stop_reason == "stop" and broken.notes["error"] == "OSError: still busy"


def test_where_every_conversation_fails_the_environment_is_broken():
    faults = {letter: {2: KeyError("door")} for letter in "abc"}
    with pytest.raises(
        VerifierError,
        match=r"failed in all of 3 conversations, in the first with KeyError: 'door'; fix the environment$",
    ):
        listen(Listeners(**faults))


def test_conversations_that_ask_nothing_do_not_hide_a_broken_environment():
    voices = [
        PromptedClient(client, RENDERER.render(PROMPTS[0].messages))
        for client in (Parrot("ab"), Parrot("a" * 100))
    ]
    openings = [ConversationRequest(PROMPTS[0], voice, 0) for voice in voices]
    with pytest.raises(VerifierError, match="failed in all of 1 conversations"):
        run_conversations(openings, Listeners(a={1: KeyError("door")}), RENDERER, PARAMS)


@pytest.mark.parametrize("stops", [Cancelled(), KeyboardInterrupt()])
def test_who_stops_the_work_stops_it_and_every_episode_is_closed(stops):
    environment = Listeners(b={2: stops})
    with pytest.raises(type(stops)):
        listen(environment)
    assert sorted(environment.closed) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("c", "Refused: step() returned a str; return a practicum.ports.Observation"),
        (None, "Refused: step() returned a NoneType"),
        (
            Observation(Message("assistant", "c")),
            "Refused: step() spoke in the role assistant, which is the student's",
        ),
    ],
)
def test_what_is_no_observation_is_named(answer, said):
    class Wrong(Listeners):
        def open(self, prompt: Prompt, seed: int) -> Any:
            episode = Listener(prompt, seed, {}, [])
            episode.step = lambda turn: answer
            return episode

    with pytest.raises(VerifierError) as caught:
        listen(Wrong())
    assert said in str(caught.value)


@given(
    st.lists(
        st.tuples(st.text("ab\n", max_size=4), st.text("abc", min_size=1)), min_size=1, max_size=3
    )
)
def test_a_warning_has_an_author_and_the_rest_of_the_reply_is_the_reply_without_it(replies):
    """At random texts: the conversation without the harness's tokens is the conversation without warnings."""

    class Warns(Echo):
        def __init__(self, warns: bool) -> None:
            self.warns = warns

        def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
            chosen = [(warning if self.warns else "", text) for warning, text in replies]
            return FunctionEpisode(
                lambda said: "".join(chosen[len(said) - 1]) if len(said) <= len(chosen) else None,
                warn=lambda said: chosen[len(said) - 1][0],
            )

    turns = ["ab", "c", "", "a"]
    warned, plain = (listen(Warns(warns), Parrot(*turns), 90)[0] for warns in (True, False))
    rows = [conversation.complete(_empty_rollout(conversation)) for conversation in (warned, plain)]
    is_warning = rows[0].mark_tokens_by("harness")
    assert int(is_warning.sum()) == sum(len(warning) for warning, _ in replies)
    assert rows[0].tokens[~is_warning].equal(rows[1].tokens)
    assert rows[0].authors[~is_warning].equal(rows[1].authors)
    assert not rows[0].loss_mask[is_warning].any() and not rows[1].mark_tokens_by("harness").any()
    said = [turn.text for turn in rows[0].turns if turn.role == "user"]
    assert said == ["".join(reply) for reply in replies]


def _empty_rollout(conversation: Conversation) -> Rollout:
    sample = conversation.sample
    known = torch.ones(len(sample.tokens), dtype=torch.bool)
    numbers = (sample.tokens, known, sample.sampling_logprobs, sample.policy_logprobs)
    return Rollout(PROMPTS[0], (), *numbers, 0, sample.stop_reason, "")


def test_a_warning_that_does_not_begin_its_message_is_none():
    class Late(Echo):
        def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
            answer = lambda said: "ab" if len(said) == 1 else None  # noqa: E731
            return FunctionEpisode(answer, warn=lambda said: "b")

    one = listen(Late(), Parrot("a", "c"))[0]
    assert one.warning_mask is None and one.rejected == ("type",)


def test_no_conversations_are_none():
    assert run_conversations([], Echo(), RENDERER, PARAMS) == []


def recipe(folder: Path, **changes: Any) -> Any:
    data: dict[str, Any] = {
        "name": "walk",
        "student": {"model": {"hidden_size": 16, "layers": 1, "heads": 2}},
        "teacher": {"type": "expert"},
        "task": {"type": "walker", "turns": 3, "train_size": 12, "heldout_size": 4},
        "rollout": {"max_new_tokens": 24},
        "train": {"steps": 2, "prompts_per_step": 4, "checkpoint_every": 1, "threads": 1},
        "evaluation": {"prompts": 4},
    }
    return parse_recipe(data | changes, str(folder))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    folder = tmp_path_factory.mktemp("walk")
    return assemble_run(recipe(folder), folder)


def written(built: RunComponents, source: str, **changes: Any) -> list[Rollout]:
    parts = built.parts
    authors = RolloutWriters(
        changes.pop("student", built.trainer.build_sampling_client()),
        changes.pop("teacher", parts.teacher),
        parts.renderer,
        environment=as_environment(parts.task, parts.renderer),
    )
    sampling = replace(built.settings.plan(1).sampling, **changes)
    return collect_rollouts(
        RolloutBatch(parts.prompts[:6], 2, 0, 1),
        TypeAdapter(SourceChoice).validate_python(source),
        authors,
        sampling,
    )


def test_the_student_of_a_mix_of_itself_alone_holds_the_same_conversations(built: RunComponents):
    batch, sampling = (
        RolloutBatch(built.parts.prompts[:6], 2, 0, 1),
        built.settings.plan(1).sampling,
    )
    client, environment = (
        built.trainer.build_sampling_client(),
        as_environment(built.parts.task, built.parts.renderer),
    )
    plain = sample_rollouts(batch, client, built.parts.renderer, sampling, environment)
    for source in ("student", "mix(student=1.0, other=teacher)"):
        for one, other in zip(plain, written(built, source), strict=True):
            assert one.tokens.equal(other.tokens) and one.text == other.text
            assert one.loss_mask.equal(other.loss_mask) and one.sampling_logprobs.equal(
                other.sampling_logprobs
            )


@pytest.mark.parametrize(
    "source", ["teacher", "mix(student=0.0, other=teacher)", "teacher(temperature=0)"]
)
def test_the_expert_walks(built: RunComponents, source: str):
    rollouts = written(built, source)
    rewards = [built.parts.task.reward(rollout) for rollout in rollouts]
    assert sum(rewards) >= len(rewards) - 3 and all(
        len(rollout.text.split("\n")) == 3 for rollout in rollouts
    )
    assert {rollout.source for rollout in rollouts} == {"teacher"}
    assert all(rollout.policy_logprobs.isnan().all() for rollout in rollouts)
    reached = [rollout.prompt for rollout, reward in zip(rollouts, rewards, strict=True) if reward]
    if "temperature" in source:
        assert all(rollout.sampling_logprobs.eq(0).all() for rollout in rollouts)
        assert written(built, source)[1].text == rollouts[1].text and len(reached) >= 8


def test_the_teacher_speaks_the_first_turns_and_the_student_goes_on(built: RunComponents):
    student, none = written(built, "student"), written(built, "prefix(turns=0)")
    assert all(
        a.tokens.equal(b.tokens) and a.source == b.source
        for a, b in zip(student, none, strict=True)
    )
    expert = ACTIONS.index
    for rollout in written(built, "prefix(turns=2)"):
        turns, authors = rollout.turns, [AUTHORS[number] for number in rollout.authors.tolist()]
        whose = [
            author
            for turn, author in zip(turns, _speakers(turns), strict=True)
            for _ in range(turn.tokens)
        ]
        assert authors == whose and rollout.source == "student"
        # Only the last turn is learned, and the walk covers all turns of the conversation.
        learned = [author == "student" for author in authors]
        assert rollout.loss_mask.tolist() == learned and any(learned)
        assert rollout.policy_logprobs.isfinite().tolist() == learned
        assert len(rollout.replies) == 3 and all(
            expert(reply) >= 0 for reply in rollout.replies[:2]
        )
    whole = written(built, "prefix(turns=3)")
    assert {rollout.source for rollout in whole} == {"teacher"}
    assert not any(rollout.loss_mask.any() for rollout in whole)
    rewards = [built.parts.task.reward(rollout) for rollout in whole]
    assert sum(rewards) >= len(rewards) - 3, "it walks as the expert does"
    with pytest.raises(CapabilityError, match=r"single answers; use prefix\(length=64\)"):
        collect_rollouts(
            RolloutBatch([], 1, 0, 1),
            TypeAdapter(SourceChoice).validate_python("prefix(turns=1)"),
            RolloutWriters(built.parts.sampler, built.parts.teacher, built.parts.renderer),
            PARAMS,
        )


def _speakers(turns: Sequence[Turn]) -> list[str]:
    """Return the author of each turn if the teacher writes the first two."""
    speakers = iter(["teacher", "teacher", "student"])
    return [next(speakers) if turn.role == "assistant" else "environment" for turn in turns]


def test_a_join_has_conversations_of_both(built: RunComponents):
    rollouts = written(built, "join(other=teacher, n=1)")
    assert [rollout.source for rollout in rollouts[:3]] == ["student", "student", "teacher"]


@pytest.mark.parametrize(
    "source", ["dataset", "token_mix(teacher=0.5)", "prefix(length=2)", "mix(0.5)", "join(n=2)"]
)
def test_a_source_that_cannot_converse_is_refused_in_one_line(
    built: RunComponents, tmp_path: Path, source: str
):
    with pytest.raises(
        CapabilityError,
        match=r"does not write turn by turn, and this task answers every turn; (set|use)",
    ):
        written(built, source)
    changed = recipe(tmp_path, rollout={"max_new_tokens": 24, "source": source})
    with pytest.raises(CapabilityError, match=r"rollout.source: .* does not write turn by turn"):
        assemble_run(changed, tmp_path)


class Deaf(ExpertTeacher):
    """A teacher that only answers messages, as behind a chat server."""

    def bind_prompt(self, prompt: Prompt) -> PromptedClient:
        return replace(super().bind_prompt(prompt), accepts_tokens=False)


def test_a_teacher_that_answers_messages_alone_is_refused(built: RunComponents):
    with pytest.raises(
        CapabilityError, match="cannot continue from tokens, so it cannot hold a conversation"
    ):
        written(built, "teacher", teacher=Deaf(built.parts.task, built.parts.renderer, 0.1))


def test_evaluation_measures_what_the_student_said_and_nothing_else(built: RunComponents):
    parts, settings = built.parts, built.evaluation
    assert settings is not None
    client = parts.sampler
    found = evaluate(client, parts.renderer, parts.task, parts.teacher, settings)
    batch = RolloutBatch(
        settings.prompts, settings.samples, settings.seed, step=1, stream="evaluation"
    )
    environment = as_environment(parts.task, parts.renderer)
    rollouts = sample_rollouts(batch, client, parts.renderer, settings.sampling, environment)
    own = [rollout.policy_logprobs[rollout.loss_mask] for rollout in rollouts]
    assert [answer.logprob for answer in found.answers] == [
        values.double().mean().item() for values in own
    ]
    signals = parts.teacher.score(rollouts, Full())
    mine = client.score(
        [ScoreRequest(r.prompt_tokens, tuple(r.tokens.tolist())) for r in rollouts], Full()
    )
    distances = []
    for rollout, student, teacher in zip(rollouts, mine, signals, strict=True):
        p, q = (
            side.head.logprobs(side.hidden)[rollout.loss_mask].double()
            for side in (student, teacher)
        )
        distances.append((p.exp() * (p - q)).sum(-1))
    assert math.isclose(found.reverse_kl or 0, torch.cat(distances).mean().item(), rel_tol=1e-4)
    teacher = evaluate_teacher(parts.teacher, parts.renderer, parts.task, settings)
    assert teacher is not None and teacher.accuracy is not None and teacher.accuracy.mean >= 0.5
    for trace, rollout in zip(found.traces, rollouts, strict=True):
        assert [value is not None for value in trace.reverse_kl] == rollout.loss_mask.tolist()


def test_a_run_converses_and_is_replayed_from_its_tape(tmp_path: Path):
    replaying = {"max_new_tokens": 24, "source": "mix(student=0.5, other=replay)"}
    whole = run(recipe(tmp_path, rollout=replaying), out=tmp_path).folder
    home = Path(whole)
    assert (home / "report.html").is_file()
    recorded = rows(home / "rollouts.jsonl")
    assert any(not all(row["loss_mask"]) for row in recorded)
    for row in recorded:
        runs = row.get("authors", [{"author": row["source"], "tokens": len(row["tokens"])}])
        assert [
            run["author"] != "environment" for run in runs for _ in range(run["tokens"])
        ] == row["loss_mask"]
        assert sum(turn["tokens"] for turn in row["turns"]) == len(row["tokens"])
        scored = [value is not None for value in row["teacher_logprobs"]]
        assert scored == row["loss_mask"]
    tape = home / "rollouts.jsonl"
    again = recipe(
        tmp_path,
        name="again",
        student={"model": str(home / "models" / "student")},
        rollout={"max_new_tokens": 24, "source": f"cache(path={tape})"},
        teacher={"type": "scripted", "tape": str(tape)},
        objective={"signal": "sampled", "divergence": "reverse_kl"},
        train={"steps": 1, "prompts_per_step": 2, "threads": 1},
        evaluation={"prompts": 0},
    )
    assert json.loads(json.dumps(curve(Path(run(again, out=tmp_path).folder), "tokens")))[0] > 0


def test_sampling_counts_what_is_read_again_each_turn(built: RunComponents):
    parts = built.parts
    parts.ledger.take()
    batch = RolloutBatch(parts.prompts[:1], 1, 0, 1)
    environment = as_environment(parts.task, parts.renderer)
    (one,) = sample_rollouts(
        batch,
        parts.sampler,
        parts.renderer,
        replace(PARAMS, stop_ids=parts.renderer.stop_ids),
        environment,
    )
    counted = parts.ledger.take()
    assert counted["cost/sampled_tokens"] == int(one.loss_mask.sum())
    if one.stop_reason == "stop":
        begins = [0] + [
            n + 1
            for n, (a, b) in enumerate(zip(one.loss_mask, one.loss_mask[1:], strict=False))
            if b and not a
        ]
        assert counted["cost/prompt_tokens"] == sum(
            len(one.prompt_tokens) + begin for begin in begins
        )


def test_a_run_whose_environment_breaks_is_saved_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train = {"steps": 4, "prompts_per_step": 4, "checkpoint_every": None, "threads": 1}
    settings = recipe(tmp_path, train=train, rollout={"max_new_tokens": 24, "n": 4})
    whole = run(settings, out=tmp_path / "whole").folder
    begin, steps = loop.generate_rollouts, [0]

    def generate_rollouts(step: int, *arguments: Any, version: int) -> Any:
        steps.append(step)
        return begin(step, *arguments, version=version)

    def fail(self: Walker, prompt: Prompt, seed: int) -> Any:
        if steps[-1] == 3:
            raise ConnectionError("the line went dead")
        return opens(self, prompt, seed)

    opens = Walker.open
    monkeypatch.setattr(loop, "generate_rollouts", generate_rollouts)
    monkeypatch.setattr(Walker, "open", fail)
    with pytest.raises(VerifierError) as caught:
        run(settings, out=tmp_path)
    assert str(caught.value).startswith("step 3: the task's environment failed in all of")
    assert str(caught.value).endswith(
        "; fix the environment (the state after step 2 is saved; resume with resume=True)"
    )
    monkeypatch.undo()
    resumed = run(settings, out=tmp_path, resume=True).folder
    assert_same_run(Path(whole), Path(resumed))
