"""The task's own expert as a teacher: a case by hand, the laws of its rows, its texts, and tasks without an expert."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch

from practicum.agents import FunctionEpisode
from practicum.errors import CapabilityError, TeacherError, VerifierError
from practicum.losses import read_tokens
from practicum.objective import Full, Sampled
from practicum.ports import (
    Task,
    TeacherContext,
    TeacherRequest,
)
from practicum.tasks.walker import Config as WalkerConfig
from practicum.tasks.walker import Walker
from practicum.teachers.expert import Config, ExpertTeacher, build
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import Message, Prompt, Rollout, SampleRequest, SamplingParams

TOKENIZER = build_character_tokenizer("abcd")
RENDERER = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
STOP, VOCABULARY = TOKENIZER.eos_token_id, len(TOKENIZER)
A, B, C, D = TOKENIZER.convert_tokens_to_ids(list("abcd"))
PROMPT = Prompt("p", (Message("user", "d"),))
SOFTNESS = 0.11


class Asked(Task):
    """Writes ab, ac or b, and after any answer asks once more, where the right answer is c."""

    def __init__(self, candidates: Mapping[str, float] | None = None) -> None:
        self.candidates = candidates or {"ab": 0.5, "ac": 0.25, "b": 0.25}

    def train_prompts(self) -> list[Prompt]:
        return [PROMPT]

    def heldout_prompts(self) -> list[Prompt]:
        return []

    def reward(self, rollout: Rollout) -> float:
        return 0.0

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        return {"c": 1.0} if turns else self.candidates

    def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
        return FunctionEpisode(lambda said: "dd" if len(said) == 1 else None)


class Redirected(Asked):
    """Ends any other beginning of a turn with two more letters d."""

    def redirect(self, prompt: Prompt, turns: Sequence[str], start: str) -> Mapping[str, float]:
        return {f"{start}dd": 1.0}


def teacher(softness: float = SOFTNESS, **settings: Mapping[str, float]) -> ExpertTeacher:
    return ExpertTeacher(Asked(**settings), RENDERER, softness)


def rollout(tokens: Sequence[int]) -> Rollout:
    nothing = torch.zeros(len(tokens))
    ids = torch.tensor(tokens, dtype=torch.long)
    return Rollout(
        PROMPT, RENDERER.render(PROMPT.messages), ids, nothing == 0, nothing, nothing, 0, "stop", ""
    )


def probabilities(tokens: Sequence[int], **settings: Mapping[str, float]) -> torch.Tensor:
    """Return the expert's distributions at each token."""
    (signal,) = teacher(**settings).score([rollout(tokens)], Full())
    full = read_tokens(signal, slice(None)).full
    assert full is not None
    return full.exp()


def row(**shares: float) -> torch.Tensor:
    """Return a distribution with these shares on top of the uniform part; names are the letters and `stop`."""
    tokens = {"a": A, "b": B, "c": C, "d": D, "stop": STOP}
    expected = torch.full((VOCABULARY,), SOFTNESS / VOCABULARY)
    for name, share in shares.items():
        expected[tokens[name]] += (1 - SOFTNESS) * share
    return expected


def test_a_turn_by_hand():
    found = probabilities([A, B, STOP])
    torch.testing.assert_close(
        found, torch.stack([row(a=0.75, b=0.25), row(b=2 / 3, c=1 / 3), row(stop=1)])
    )
    torch.testing.assert_close(probabilities([B, STOP])[1], row(stop=1.0))


def test_a_turn_that_nobody_would_begin_so_should_end():
    torch.testing.assert_close(probabilities([D, A, STOP])[1:], torch.stack([row(stop=1.0)] * 2))


def test_after_the_environment_spoke_the_next_turn_begins():
    heard = RENDERER.render_reply(Message("user", "dd"))
    found = probabilities([B, STOP, *heard, C, STOP])
    assert len(heard) == 4
    torch.testing.assert_close(found[2:6], torch.full((4, VOCABULARY), 1 / VOCABULARY))
    torch.testing.assert_close(found[6:], torch.stack([row(c=1.0), row(stop=1.0)]))


class Broken(Asked):
    """An environment that opens no episode."""

    def open(self, prompt: Prompt, seed: int) -> FunctionEpisode:
        raise OSError("no sandbox")


def test_a_conversation_that_its_environment_ended_is_scored_all_the_same():
    answers = [rollout([A, B, STOP])]
    expected = teacher().score(answers, Sampled())[0].logprobs
    found = ExpertTeacher(Broken(), RENDERER, SOFTNESS).score(answers, Sampled())[0].logprobs
    assert expected is not None and found is not None and found.equal(expected)


def test_an_environment_that_fails_while_the_expert_reads_is_one_line():
    heard = RENDERER.render_reply(Message("user", "dd"))
    with pytest.raises(VerifierError, match=r"failed .* prompt 'p': OSError: no sandbox; fix it$"):
        ExpertTeacher(Broken(), RENDERER, SOFTNESS).score(
            [rollout([B, STOP, *heard, C])], Sampled()
        )


def test_a_candidate_that_begins_another_may_end_or_go_on():
    torch.testing.assert_close(
        probabilities([A], candidates={"a": 0.25, "ab": 0.75})[0], row(a=1.0)
    )
    torch.testing.assert_close(
        probabilities([A, B], candidates={"a": 0.25, "ab": 0.75})[1], row(stop=0.25, b=0.75)
    )


@pytest.mark.parametrize(
    "tokens",
    [[A, B, STOP], [D, D, D], [B, STOP, *RENDERER.render_reply(Message("user", "dd")), C, A], []],
)
def test_rows_sum_to_one_and_the_sampled_token_is_an_entry(tokens):
    one, other = rollout(tokens), rollout([B, STOP])
    full, sampled = teacher().score([one, other], Full()), teacher().score([one, other], Sampled())
    assert full[0].head is full[1].head, "rollouts share a head, so that they are read together"
    for signal, own, scored in zip(full, (one, other), sampled, strict=True):
        rows = read_tokens(signal, slice(None)).full
        assert rows is not None and scored.logprobs is not None and torch.isfinite(rows).all()
        torch.testing.assert_close(
            rows.double().exp().sum(-1), torch.ones(len(rows)).double(), atol=1e-6, rtol=0
        )
        assert scored.logprobs.equal(rows.gather(-1, own.tokens[:, None])[:, 0])


def test_what_it_writes_has_its_own_probabilities():
    expert, params = teacher(), SamplingParams(9, stop_ids=RENDERER.stop_ids)
    samples = expert.sample([TeacherRequest(PROMPT, seed) for seed in range(2000)], params)
    texts = [RENDERER.decode(sample.tokens.tolist()) for sample in samples]
    softly = (1 - SOFTNESS) * 0.75 + SOFTNESS / VOCABULARY
    first = sum(text.startswith("a") for text in texts) / len(texts)
    assert abs(first - softly) < 4 * math.sqrt(softly * (1 - softly) / len(texts))
    (scored,) = expert.score([rollout(samples[0].tokens.tolist())], Sampled())
    assert samples[0].policy_logprobs.equal(scored.logprobs) and samples[0].sampling_logprobs.equal(
        scored.logprobs
    )


def test_cold_it_says_the_likeliest_and_hot_anything():
    def written(temperature: float) -> set[str]:
        params = SamplingParams(1, temperature=temperature, stop_ids=RENDERER.stop_ids)
        samples = teacher().sample([TeacherRequest(PROMPT, seed) for seed in range(60)], params)
        return {RENDERER.decode(sample.tokens.tolist()) for sample in samples}

    assert written(0.0) == {"a"}
    assert written(100.0) == {"", "a", "b", "c", "d"}, (
        "a stop token or another control token reads as nothing"
    )


def test_its_voice_goes_on_from_any_tokens_whatever_it_read_before():
    voice, params = (
        teacher(1e-9).bind_prompt(PROMPT),
        SamplingParams(9, temperature=0.0, stop_ids=RENDERER.stop_ids),
    )
    prompt = voice.prompt_tokens
    asked = [(), (A,), (B, STOP, *RENDERER.render_reply(Message("user", "dd"))), (A, C), ()]
    for tokens, expected in zip(asked, ["ab", "b", "c", "", "ab"], strict=True):
        (sample,) = voice.client.sample([SampleRequest((*prompt, *tokens), 0)], params)
        assert RENDERER.decode(sample.tokens.tolist()) == expected and sample.stop_reason == "stop"


def test_a_task_without_an_expert_is_refused():
    context = TeacherContext(RENDERER)
    with pytest.raises(
        CapabilityError, match=r"this task has no expert; write task: walker, .*\{type: model"
    ):
        build(Config(), context)


@pytest.mark.parametrize("candidates", [{"a": 0.5, "b": 0.4}, {"a": 1.5, "b": -0.5}])
def test_candidates_that_are_no_distribution_are_refused(candidates):
    with pytest.raises(TeacherError, match=r"candidates for turn 1 of prompt 'p' .* the sum 1"):
        teacher(candidates=candidates).score([rollout([A])], Full())


def test_it_knows_the_walk():
    task = Walker(WalkerConfig(train_size=1), seed=0)
    tokenizer = build_character_tokenizer(task.letters)
    renderer = Renderer(tokenizer, stop_ids=collect_stop_ids(tokenizer, None))
    (prompt,) = task.train_prompts()
    said = task.expert(prompt, ())
    expert = ExpertTeacher(task, renderer, 1e-6)
    ids = torch.tensor(renderer.encode_answer(prompt.messages, max(said, key=said.__getitem__), 9))
    nothing = torch.zeros(len(ids))
    own = Rollout(
        prompt, renderer.render(prompt.messages), ids, nothing == 0, nothing, nothing, 0, "stop", ""
    )
    (signal,) = expert.score([own], Sampled())
    assert signal.logprobs is not None
    torch.testing.assert_close(signal.logprobs.exp(), torch.tensor([0.96, 1.0]), atol=1e-4, rtol=0)


def test_a_turn_that_began_as_no_candidate_ends_or_is_continued() -> None:
    tokens = [D, A, D, B]
    for task, expected in ((Asked(), [STOP] * 3), (Redirected(), [D, D, D])):
        (signal,) = ExpertTeacher(task, RENDERER, SOFTNESS).score([rollout(tokens)], Full())
        assert signal.hidden is not None and signal.head is not None
        assert signal.head.logprobs(signal.hidden).argmax(-1).tolist()[1:] == expected
    # After its own continuation, the expert wants the turn to end.
    (signal,) = ExpertTeacher(Redirected(), RENDERER, SOFTNESS).score(
        [rollout([D, D, D, STOP])], Full()
    )
    assert signal.hidden is not None and signal.head is not None
    assert signal.head.logprobs(signal.hidden).argmax(-1).tolist()[1:] == [D, D, STOP]
