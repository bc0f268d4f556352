"""The search of rStar: votes instead of a verifier, five actions, and the one answer that a second model agrees with."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from toy import make_model, toy_recipe, toy_run

from practicum.errors import CapabilityError, RecipeError
from practicum.methods.rstar.mutual import (
    ACTIONS,
    Config,
    find_returned,
    group_equal,
    mark_returned,
)
from practicum.ports import PromptedClient, SamplingClient, Task, Teacher
from practicum.rollouts import RolloutBatch, RolloutWriters, SourceChoice, collect_rollouts
from practicum.rollouts.tree import compute_uct
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import Message, Prompt, Rollout, Sample, SampleRequest, SamplingParams

TOKENIZER = build_character_tokenizer("abc qrsxy\n")
RENDERER = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
FIELDS = {"parts": "x\nxy", "rephrased": "r"}
PROMPTS = [Prompt(name, (Message("user", name),), privileged=FIELDS) for name in "qs"]
LIMIT = 16


class Writer(SamplingClient):
    """Writes what is missing of two lines of an `a` or a `b` and a last letter, by the request's seed."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        self.requests += requests
        return [self.write(request) for request in requests]

    def write(self, request: SampleRequest) -> Sample:
        lines = RENDERER.decode(list(request.prompt_tokens))
        draw = random.Random(request.seed)
        count = max(1, 3 - lines.count("\n"))
        text = "\n".join(draw.choice("ab") for _ in range(count - 1)) + "\n" * (count > 1)
        text += draw.choice("aab")
        tokens = torch.tensor([*RENDERER.encode(text), TOKENIZER.eos_token_id])
        return Sample(
            tokens, torch.full((len(tokens),), -0.5), torch.full((len(tokens),), -0.5), "stop"
        )


class LastLetter(Task):
    """Compares last letters; `c` is no answer. It has no reward without a reference."""

    def train_prompts(self) -> Sequence[Prompt]:
        return PROMPTS

    def heldout_prompts(self) -> Sequence[Prompt]:
        return []

    def reward(self, rollout: Rollout) -> float | None:
        answer = rollout.prompt.answer
        if answer is None:
            return None
        return float(rollout.text[-1:] == answer[-1:] and rollout.text[-1:] in ("a", "b"))


class Partner(Teacher):
    """A second model that ends every answer with `last`."""

    def __init__(self, last: str = "a", *, accepts_tokens: bool = True) -> None:
        self.last, self.accepts_tokens = last, accepts_tokens
        self.requests: list[SampleRequest] = []

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        return PromptedClient(self, (5,), accepts_tokens=self.accepts_tokens)  # type: ignore[arg-type]

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:  # type: ignore[override]
        self.requests += requests
        tokens = torch.tensor(RENDERER.encode(self.last))
        return [Sample(tokens, torch.zeros(1), torch.zeros(1), "stop") for _ in requests]


def search(
    source: str = "mutual(votes=3)",
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    partner: Partner | None = None,
    n: int = 12,
    seed: int = 3,
) -> tuple[list[Rollout], Writer]:
    student, model = Writer(), partner or Partner()
    writers = RolloutWriters(student, model, RENDERER, reference=model, task=LastLetter())
    params = SamplingParams(LIMIT, stop_ids=RENDERER.stop_ids)
    choice = TypeAdapter(SourceChoice).validate_python(source)
    return collect_rollouts(RolloutBatch(prompts, n, seed, 1), choice, writers, params), student


# The search.


def test_all_five_actions_are_taken_and_follow_each_other_as_released() -> None:
    rollouts, _ = search(n=40)
    after: dict[str, set[str]] = {}
    for rollout in rollouts:
        path = ["question", *rollout.notes["actions"].split()]
        assert path[-1] == "rest" and len(path) <= 6
        for first, second in itertools.pairwise(path):
            after.setdefault(first, set()).add(second)
    assert set(itertools.chain(*after.values())) == set(ACTIONS) - {"question"} | {"rest"}
    for action, members in after.items():
        assert members <= set(ACTIONS[action])
    metrics = Config.measure(rollouts)
    assert all(metrics[f"search_{name}"] > 0 for name in ("step", "part", "again", "rephrase"))


def test_no_field_no_action() -> None:
    plain = [replace(prompt, privileged={}) for prompt in PROMPTS]
    metrics = Config.measure(search(prompts=plain, n=40)[0])
    assert metrics["search_part"] == metrics["search_again"] == metrics["search_rephrase"] == 0
    assert metrics["search_step"] > 0


def test_votes_are_shares_and_no_verifier_is_asked_without_a_reference() -> None:
    rollouts, student = search("mutual(votes=4)")
    assert all(rollout.reward is None for rollout in rollouts)
    shares = {float(rollout.notes["votes"]) for rollout in rollouts}
    assert shares <= {0.25, 0.5, 0.75, 1.0} and len(shares) > 1
    # At most `depth` actions per round, of at most `votes` samples each, and a step that ends the answer costs one more.
    assert len(student.requests) <= len(rollouts) * (5 * 4 + 1)
    assert len({request.seed for request in student.requests}) == len(student.requests)


def test_tokens_written_for_another_question_have_no_log_probabilities() -> None:
    for rollout in search(n=40)[0]:
        actions = set(rollout.notes["actions"].split())
        sampled = ~rollout.policy_logprobs.isnan()
        assert rollout.text.count("\n") >= 2 and len(rollout.tokens) <= LIMIT
        if "rephrase" in actions:
            assert not sampled.any()
        elif not actions & {"part", "again"}:
            assert sampled.all()
        else:
            assert sampled.any() and not sampled.all()


def test_a_tree_depends_on_its_prompt_and_the_seed_only() -> None:
    def tell(rollouts: Sequence[Rollout]) -> list[Any]:
        return [(r.text, dict(r.notes), r.loss_mask.tolist()) for r in rollouts]

    together = tell(search()[0])
    apart = [row for prompt in PROMPTS for row in tell(search(prompts=[prompt])[0])]
    assert together == apart == tell(search()[0])
    assert together != tell(search(seed=4)[0])
    twice = search(prompts=[PROMPTS[0], PROMPTS[0]], n=6)[0]
    assert tell(twice[:6]) != tell(twice[6:])


def test_a_child_with_more_votes_is_visited_more() -> None:
    """Compare the visits of a bandit with two arms by the bound with its definition."""
    for value, parent, visits, weight in ((0.5, 9, 3, 2.0), (0.1, 40, 7, 0.3)):
        expected = value + weight * (math.log(parent) / visits) ** 0.5
        assert compute_uct(value, parent, visits, weight) == pytest.approx(expected)


# The returned answer.


def test_only_the_returned_answer_has_a_loss_and_the_partner_decides() -> None:
    for last in "ab":
        partner = Partner(last)
        rollouts, _ = search(partner=partner, n=20)
        for start in (0, 20):
            (returned,) = (r for r in rollouts[start : start + 20] if r.loss_mask.any())
            assert returned.loss_mask.all() and returned.text[-1] == last
            assert returned.notes["agreement"] == "yes"
        for rollout in rollouts:
            assert rollout.notes["agreement"] == ("yes" if rollout.text[-1] == last else "no")
    # Four beginnings of each distinct answer, from a fifth to a half of its tokens.
    texts = {(rollout.prompt.id, rollout.text) for rollout in rollouts}
    assert len(partner.requests) == 4 * len(texts)
    for request in partner.requests:
        assert 2 <= len(request.prompt_tokens) <= 1 + LIMIT // 2


def test_an_answer_to_the_original_question_is_learned_before_one_to_other_words() -> None:
    rollouts, _ = search(n=30)
    for start in (0, 30):
        tree = rollouts[start : start + 30]
        assert any("rephrase" in r.notes["actions"] and r.text[-1] == "a" for r in tree)
        (returned,) = (r for r in tree if r.loss_mask.any())
        assert "rephrase" not in returned.notes["actions"]
    paths = itertools.cycle(("rephrase rest", "step rest"))
    pair = [
        replace(r, notes={**r.notes, "actions": next(paths)}, loss_mask=r.tokens >= 0)
        for r in rollouts[:2]
    ]
    for first, second, expected in ((pair[0], pair[1], 1), (pair[0], pair[0], 0)):
        marked = mark_returned([first, second], {r.text: True for r in pair}, lambda a, b: True)
        assert [bool(r.loss_mask.any()) for r in marked].index(True) == expected


def test_one_completion_has_to_end_at_the_same_answer() -> None:
    rollouts, _ = search("mutual(votes=3, masks=1)", partner=Partner("c"))
    assert {rollout.notes["agreement"] for rollout in rollouts} == {"no"}


def test_without_agreement_the_most_confident_answer_is_returned() -> None:
    rollouts, _ = search(partner=Partner("c"), n=20)
    for start in (0, 20):
        tree = rollouts[start : start + 20]
        totals = {
            letter: sum(float(r.notes["votes"]) for r in tree if r.text[-1] == letter)
            for letter in "ab"
        }
        (returned,) = (r for r in tree if r.loss_mask.any())
        assert returned.text[-1] == max(totals, key=totals.__getitem__)


def return_as_released(
    texts: Sequence[str], votes: Sequence[float], agreed: Mapping[str, bool]
) -> int:
    """Return the winner by the released steps: candidates with frequencies, confidence plus survival."""
    candidates = [
        (text, texts.count(text), sum(v for t, v in zip(texts, votes, strict=True) if t == text))
        for text in dict.fromkeys(texts)
        if text[-1] != "c"
    ]

    def group(members: Sequence[tuple[str, int, float]]) -> dict[str, tuple[int, float]]:
        total = sum(count for _, count, _ in members)
        return {
            letter: (
                sum(count for text, count, _ in members if text[-1] == letter),
                sum(reward for text, _, reward in members if text[-1] == letter) / total,
            )
            for letter in dict.fromkeys(text[-1] for text, _, _ in members)
        }

    passed = [member for member in candidates if agreed[member[0]]]
    every, filtered = group(candidates), group(passed)
    if passed:
        scores = {
            letter: confidence + count / every[letter][0]
            for letter, (count, confidence) in filtered.items()
        }
    else:
        scores = {letter: confidence for letter, (_, confidence) in every.items()}
    winner = max(scores, key=scores.__getitem__)
    return texts.index(next(t for t, _, _ in passed or candidates if t[-1] == winner))


def test_the_returned_answer_is_the_released_one() -> None:
    def same(first: str, second: str) -> bool:
        return first[-1] == second[-1] != "c"

    draw = random.Random(0)
    for _ in range(300):
        texts = [draw.choice("xyz") + draw.choice("abdc") for _ in range(draw.randint(1, 9))]
        votes = [draw.random() for _ in texts]
        agreed = {text: draw.random() < 0.5 for text in texts if text[-1] != "c"}
        if not agreed:
            assert find_returned(texts, votes, agreed, same) is None
            continue
        assert find_returned(texts, votes, agreed, same) == return_as_released(texts, votes, agreed)
    assert group_equal(["xa", "ya", "zc", "xb"], same) == [[0, 1], [3]]


def test_agreement_needs_a_model_that_goes_on_from_tokens() -> None:
    with pytest.raises(CapabilityError, match="cannot continue from tokens; use a model that can"):
        search(partner=Partner(accepts_tokens=False))


# Whole runs.


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spaced")
    make_model(folder / "student", seed=1, alphabet="abcd ")
    return folder


RUN = {
    "rollout": {"source": "mutual(step=word, votes=2)", "n": 4, "max_new_tokens": 9},
    "objective": {"signal": "text", "divergence": "ce"},
    "teacher": {"type": "none"},
    "reference": {"type": "self", "weights": "frozen"},
}


def test_a_run_is_resumed_as_if_it_had_not_stopped(spaced: Path, tmp_path: Path) -> None:
    whole = toy_run(spaced, tmp_path / "whole", RUN).folder
    toy_run(spaced, tmp_path / "cut", {**RUN, "train.steps": 2})
    cut = toy_run(spaced, tmp_path / "cut", RUN, resume=True, allow_changed=["train.steps"]).folder
    assert (whole / "rollouts.jsonl").read_bytes() == (cut / "rollouts.jsonl").read_bytes()


def test_a_recipe_without_the_second_model_is_refused(spaced: Path) -> None:
    with pytest.raises(RecipeError, match="needs a reference, and the recipe has none"):
        toy_recipe(spaced, {**RUN, "reference": None})
