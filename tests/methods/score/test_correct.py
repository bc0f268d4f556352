"""Corrected conversations: the teacher writes the first wrong turn, earlier turns stay, and the same environment answers."""

from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter
from toy import toy_recipe

from practicum.errors import CapabilityError, VerifierError
from practicum.methods.score.correct import Config, find_turn
from practicum.ports import (
    Episode,
    Observation,
    PromptedClient,
    SamplingClient,
    Task,
)
from practicum.ports.scoring import Scorer
from practicum.rollouts import (
    RolloutBatch,
    RolloutWriters,
    SourceChoice,
    collect_rollouts,
)
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.conversation import run_conversations
from practicum.rollouts.openings import Beginning, ConversationRequest
from practicum.rollouts.tape import mark_authors
from practicum.runs.assembly import assemble_run
from practicum.teachers.expert import ExpertTeacher
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import AUTHORS, Message, Prompt, Sample, SamplingParams, Turn

TOKENIZER = build_character_tokenizer("abcdxy")
RENDERER = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
STOP = TOKENIZER.eos_token_id
PARAMS = SamplingParams(60, stop_ids=RENDERER.stop_ids)
PROMPTS = [Prompt(letter, (Message("user", letter),)) for letter in "abc"]
STUDENT, TEACHER, WORLD = (AUTHORS.index(name) for name in ("student", "teacher", "environment"))


class Echo(Task):
    """Asks for its letter four times, in words that depend on the seed; a `moody` environment changes its words each time."""

    letters = "abcdxy"

    def __init__(self, *, moody=False):
        self.moody, self.opened = moody, []

    def train_prompts(self):
        return PROMPTS

    def heldout_prompts(self):
        return []

    def reward(self, rollout):
        return float(all(reply[0] == rollout.prompt.id for reply in rollout.replies))

    def open(self, prompt, seed):
        self.opened.append(seed)
        return World(seed, len(self.opened) if self.moody else 0)

    def expert(self, prompt, turns):
        """Return the expert's letter, sometimes twice, with probability three quarters for the right one."""
        others = [letter for letter in "abcd" if letter != prompt.id]
        return {prompt.id: 0.75, **dict.fromkeys(others, 0.25 / 3)}


class World(Episode):
    def __init__(self, seed, mood):
        self.seed, self.mood, self.heard = seed, mood, 0

    def step(self, turn):
        self.heard += 1
        text = "xy"[(self.seed + self.heard) % 2] * (1 + self.heard + self.mood)
        return Observation(Message("user", text) if self.heard < 4 else None)

    def close(self):
        pass


class Slipping(SamplingClient):
    """Writes the prompt's letter, but `d` in turn `slip`; `again` replaces that turn, by the number of the call."""

    def __init__(self, slip, again=None, *, late=False):
        self.slip, self.again, self.late = slip, again or {}, late
        self.slips: dict[tuple[int, ...], int] = {}

    def sample(self, requests, params):
        return [self.say(request) for request in requests]

    def say(self, request):
        begins = TOKENIZER.convert_tokens_to_ids("<assistant>")
        number = request.prompt_tokens.count(begins)
        letter = request.prompt_tokens[request.prompt_tokens.index(begins) - 1]
        text = [letter]
        if number == self.slip:
            count = self.slips[request.prompt_tokens] = (
                self.slips.get(request.prompt_tokens, -2) + 1
            )
            word = "d" if count < 0 else self.again.get(count, "d")
            text = [letter] if word is None else [TOKENIZER.convert_tokens_to_ids(word[0])]
        elif self.late and number > self.slip:
            text = [TOKENIZER.convert_tokens_to_ids("d")]
        logprobs = torch.tensor([-1.0, -0.5])
        return Sample(torch.tensor([*text, STOP]), logprobs, logprobs, "stop")


class ByTurn(Scorer):
    """Rejects the turn that contains d."""

    def score(self, rollouts):
        raise AssertionError

    def count_accepted(self, rollouts):
        return [self.find(rollout) for rollout in rollouts]

    def find(self, rollout):
        position = spoken = 0
        for turn in rollout.turns:
            if turn.text.startswith("d"):
                # Counted as by a judge of turns: from the end of the student's previous turn.
                return spoken
            position += turn.tokens
            spoken = position if turn.role == "assistant" else spoken
        return None


def collect(source, student, environment=None, n=1, **changes):
    environment = Echo() if environment is None else environment
    teacher = ExpertTeacher(environment, RENDERER, 0.0)
    writers = RolloutWriters(
        student, teacher, RENDERER, environment=environment, task=environment, **changes
    )
    batch = RolloutBatch(PROMPTS, n, seed=7, step=3)
    return collect_rollouts(
        batch, TypeAdapter(SourceChoice).validate_python(source), writers, PARAMS
    )


@pytest.mark.parametrize("slip", [1, 3, 4])
def test_the_first_wrong_turn_is_the_teachers(slip):
    student, environment = Slipping(slip), Echo()
    plain = collect("student", Slipping(slip))
    found = collect("correct", student, environment)
    for before, rollout in zip(plain, found, strict=True):
        place = 2 * (slip - 1)
        start = sum(turn.tokens for turn in before.turns[:place])
        assert torch.equal(rollout.tokens[:start], before.tokens[:start])
        assert rollout.turns[:place] == before.turns[:place]
        assert rollout.notes["corrected"] == str(slip)
        assert rollout.notes["rejected_turn"][0] == "d"
        said = rollout.turns[place]
        authors = rollout.authors.tolist()
        assert set(authors[start : start + said.tokens]) == {TEACHER}
        assert authors.count(TEACHER) == said.tokens
        assert authors.count(WORLD) == sum(t.tokens for t in rollout.turns if t.role == "user")
        assert rollout.policy_logprobs[start : start + said.tokens].isnan().all()
        assert rollout.source == "student"
        # The student continues to the end, in the environment that answered before.
        assert [turn.role for turn in rollout.turns] == 3 * ["assistant", "user"] + ["assistant"]
        assert [t.text for t in rollout.turns[1::2]] == [t.text for t in before.turns[1::2]]
    # The expert reads in separate episodes, which have the seed 0.
    seeds = [seed for seed in environment.opened if seed]
    assert seeds[:3] == seeds[3:]
    assert Config.measure(found) == {
        "corrected": 1.0,
        "corrected_refused": 0.0,
        "corrected_turn": slip,
    }


@pytest.mark.parametrize("slip", [1, 3])
def test_the_student_acts_again_from_what_was_right(slip):
    """Sample three times per prompt in the same environment: solved gives 1, the wrong turn again 0, another wrong turn 0.1."""
    environment = Echo()
    turns = {0: "d", 1: None, 2: "x", 3: "bc"}
    student = Slipping(slip, turns)
    found = collect("correct(start=verified)", student, environment, n=3)
    assert [rollout.sample for rollout in found] == 3 * [0, 1, 2]
    for rollout in found:
        place = 2 * (slip - 1)
        start = sum(turn.tokens for turn in rollout.turns[:place])
        assert not rollout.loss_mask[:start].any()
        said = rollout.turns[place]
        assert rollout.loss_mask[start : start + said.tokens].all()
        assert rollout.notes["corrected"] == str(slip)
        if all(reply[0] == rollout.prompt.id for reply in rollout.replies):
            assert rollout.reward == 1
        else:
            wrong = rollout.notes["rejected_turn"]
            assert rollout.reward == (0 if said.text == wrong else 0.1)
    assert {0.0, 0.1, 1.0} == {rollout.reward for rollout in found}
    assert len({seed for seed in environment.opened if seed}) == 3


def test_the_corrected_turn_in_a_walk_that_fails_is_worth_a_half():
    """The expert's letter is written again, and a later turn is wrong."""
    found = collect("correct(start=verified)", Slipping(1, {0: None}, late=True), n=1)
    assert [rollout.reward for rollout in found] == 3 * [0.5]


def test_what_is_right_stays_bit_for_bit():
    found, plain = collect("correct", Slipping(9)), collect("student", Slipping(9))
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one.tokens, other.tokens) and one.turns == other.turns
        assert one.notes == {"corrected": "none"}
    assert Config.measure(found) == {"corrected": 0.0, "corrected_refused": 0.0}
    assert Config.measure(plain) == {}


def test_a_judge_of_turns_may_know_instead_of_the_expert():
    scorers = {"reader": ByTurn()}
    found = collect("correct(scorer=reader)", Slipping(3), scorers=scorers)
    assert [rollout.notes["corrected"] for rollout in found] == 3 * ["3"]
    turns = (Turn("assistant", 2, "a"), Turn("user", 4, "x"), Turn("assistant", 3, "b"))
    assert [find_turn(turns, start) for start in (0, 1, 2, 6, 7)] == [0, 2, 2, 2, None]


def test_a_world_that_answers_otherwise_ends_its_conversation():
    with pytest.raises(VerifierError, match="no longer answers the beginning as it did"):
        collect("correct", Slipping(3), Echo(moody=True))


def test_a_conversation_goes_on_from_its_beginning():
    """Check that an episode replayed from any turn gives the same conversation."""
    client = Slipping(9)
    prompted = PromptedClient(client, RENDERER.render(PROMPTS[0].messages))
    request = ConversationRequest(PROMPTS[0], prompted, 5)
    (whole,) = run_conversations([request], Echo(), RENDERER, PARAMS)
    for place in range(1, len(whole.turns) + 1):
        count = sum(turn.tokens for turn in whole.turns[:place])
        mask = whole.model_mask[:count]
        sample = whole.sample

        beginning = Beginning(
            replace(
                Tokens.from_sample(sample, "student", 0).cut(0, count),
                authors=mark_authors(mask, "student", "environment"),
            ),
            whole.turns[:place],
        )
        (again,) = run_conversations(
            [replace(request, beginning=beginning)], Echo(), RENDERER, PARAMS
        )
        assert torch.equal(again.sample.tokens, sample.tokens)
        assert torch.equal(again.model_mask, whole.model_mask)
        assert again.turns == whole.turns


def test_single_answers_are_refused_before_anything_is_sampled(models, tmp_path):
    recipe = toy_recipe(models, {"rollout.source": "correct"})
    with pytest.raises(CapabilityError, match="correct needs conversations"):
        assemble_run(recipe, tmp_path)


def test_what_cannot_correct_is_refused():
    environment = Echo()
    teacher = ExpertTeacher(environment, RENDERER, 0.0)
    writers = RolloutWriters(
        Slipping(1), teacher, RENDERER, environment=environment, task=BareTask()
    )
    source = TypeAdapter(SourceChoice).validate_python("correct")
    with pytest.raises(CapabilityError, match="this task has no expert; set correct"):
        collect_rollouts(RolloutBatch(PROMPTS, 1, seed=7, step=3), source, writers, PARAMS)
    bare = replace(writers, environment=None)
    with pytest.raises(CapabilityError, match="correct needs conversations"):
        collect_rollouts(RolloutBatch(PROMPTS, 1, seed=7, step=3), source, bare, PARAMS)


class BareTask(Task):
    """A task that knows no right turn."""

    def train_prompts(self):
        return PROMPTS

    def heldout_prompts(self):
        return []

    def reward(self, rollout):
        return None
