"""Answers with a note in place of a statement: which tokens stay, which are added, and their metadata."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toy import assert_same_run, curve, forked, rows, toy_recipe, toy_run
from transformers import PreTrainedTokenizerFast

from practicum.errors import DataError, RecipeError
from practicum.methods.caopd import rate
from practicum.methods.caopd.restate import Config, split_statement, write_ending
from practicum.ports import Task
from practicum.ports.notes import Note
from practicum.rollouts import RolloutBatch, RolloutWriters, SourceChoice, collect_rollouts
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.text import Renderer
from practicum.types import AUTHORS, Prompt, Rollout, SamplingParams

from .stated import STATED

SOURCE: TypeAdapter[Any] = TypeAdapter(SourceChoice)
ENDING = "\nConfidence: 0.25"


def merging() -> Renderer:
    """Build a tokenizer with tokens of several letters that span spaces and line ends, so that statements begin within one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["42\nConfidence: 0.25", "it is 42. Confidence: 1.0", "4 * 2 = 8\n\nConfidence: 0.9"] * 9,
        trainer,
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        chat_template="{% for m in messages %}{{ m['content'] }}<end>{% endfor %}",
    )
    return Renderer(fast, stop_ids=frozenset({0}))


RENDERER = merging()
TOKENS = st.lists(st.integers(1, RENDERER.vocab_size - 1), max_size=30)


def test_a_statement_goes_from_its_name_to_the_end() -> None:
    assert split_statement("42\n\nconfidence: 0.9 or so\nbye", "Confidence:") == (
        "42",
        "confidence: 0.9 or so\nbye",
    )
    assert split_statement(" 42. \n", "Confidence:") == (" 42.", "")
    assert split_statement("Confidence: 1", "Confidence:") == ("", "Confidence: 1")


@given(TOKENS, st.booleans(), st.integers(20, 60))
def test_what_lies_before_the_statement_stays_token_for_token(
    sampled: list[int], stops: bool, limit: int
) -> None:
    """Draw any tokens, also sequences that a tokenizer would not choose or that end within a character."""
    sampled = [*sampled, 0] if stops else sampled
    before, _ = split_statement(RENDERER.decode(sampled), "Confidence:")
    tokens, kept = write_ending(RENDERER, sampled, before, ENDING, limit)
    text = RENDERER.decode(tokens)
    assert text.endswith(ENDING) and len(tokens) <= limit
    assert tokens[-1] == 0 and 0 not in tokens[:-1]
    assert tokens[:kept] == sampled[:kept]
    if len(RENDERER.encode_answer_text(before + ENDING)) + 1 + len(sampled) <= limit:
        assert text == before + ENDING
    beginning = text.removesuffix(ENDING)
    assert before.startswith(beginning)
    count = len(sampled) - stops
    assert kept == max(
        n for n in range(count + 1) if beginning.startswith(RENDERER.decode(sampled[:n]))
    )


def test_a_statement_that_has_no_room_is_an_error() -> None:
    with pytest.raises(
        DataError, match=r"max_new_tokens: 2 tokens have no room for 'Confidence: 0"
    ):
        write_ending(RENDERER, [], "", "\nConfidence: 0.77777", 2)


@dataclass
class Whims(Task):
    """Treats an answer as right if it begins with a letter."""

    prompts: Sequence[Prompt]

    def train_prompts(self) -> Sequence[Prompt]:
        return self.prompts

    def heldout_prompts(self) -> Sequence[Prompt]:
        return []

    def reward(self, rollout: Rollout) -> float | None:
        return float(rollout.text[:1].isalpha())


@pytest.fixture(scope="module")
def parts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    recipe = toy_recipe(
        models, {"student.model": STATED["student.model"], "teacher": {"type": "self"}}
    )
    return assemble_run(recipe, tmp_path_factory.mktemp("models"))


def collect(parts: RunComponents, source: str, note: Note | None = None) -> list[Rollout]:
    components = parts.parts
    task = Whims(components.prompts)
    notes = {"confidence": note or rate.PassRate(rate.Config())}
    writers = RolloutWriters(
        components.sampler, components.teacher, components.renderer, task=task, notes=notes
    )
    batch = RolloutBatch(components.prompts[:3], 4, 0, 1)
    params = SamplingParams(32, stop_ids=components.renderer.stop_ids)
    return collect_rollouts(batch, SOURCE.validate_python(source), writers, params)


def test_every_answer_states_the_rate_and_keeps_its_reward(parts: RunComponents) -> None:
    plain, restated = collect(parts, "student"), collect(parts, "restate(confidence)")
    for before, after in zip(plain, restated, strict=True):
        group = [r.text[:1].isalpha() for r in plain if r.prompt.id == before.prompt.id]
        share = f"{sum(group) / len(group):.2f}"
        assert after.text.endswith(f"\nConfidence: {share}")
        assert after.reward == float(before.text[:1].isalpha()), (
            "the reward of the student's own answer"
        )
        assert after.notes == {"confidence": share, "restated": ""}
        assert after.stop_reason == "stop" and after.loss_mask.all() and after.states is None
        own = after.mark_tokens_by("student")
        kept = int(own.sum())
        assert own[:kept].all() and after.tokens[:kept].equal(before.tokens[:kept])
        assert after.sampling_logprobs[:kept].equal(before.sampling_logprobs[:kept])
        assert after.policy_logprobs[:kept].equal(before.policy_logprobs[:kept])
        assert after.policy_logprobs[kept:].isnan().all()
        assert not after.sampling_logprobs[kept:].any()
        assert (after.authors[kept:] == AUTHORS.index("dataset")).all()
    assert Config.measure(restated) == {"restated": 0.0} and Config.measure(plain) == {}


def test_an_answer_without_the_note_stays(parts: RunComponents) -> None:
    class Silent(Note):
        def write(self, rollouts: Any, moment: Any) -> list[str | None]:
            return [None for _ in rollouts]

    plain, same = collect(parts, "student"), collect(parts, "restate(confidence)", Silent())
    assert all(one.tokens.equal(two.tokens) for one, two in zip(plain, same, strict=True))
    assert Config.measure(same) == {}


def test_a_run_that_restates_is_the_same_after_a_kill(models: Path, tmp_path: Path) -> None:
    whole, out = toy_run(models, tmp_path / "whole", STATED).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, STATED), {"PRACTICUM_FAULT": "update:2"}) == 137
    assert_same_run(whole, toy_run(models, out, STATED, resume=True).folder)
    answers = rows(whole / "rollouts.jsonl")
    assert all(row["text"].endswith(f"\nSure: {row['notes']['sure']}") for row in answers)
    assert len(curve(whole, "restated")) == 3


def test_what_cannot_restate_is_refused(models: Path, tmp_path: Path) -> None:
    line = r"rollout.source: restate\(note=sre\): no field or note is named 'sre'; add it to notes"
    with pytest.raises(RecipeError, match=line):
        toy_recipe(models, {**STATED, "rollout.source": "restate(sre)"})
    letters = toy_recipe(models, {**STATED, "student.model": str(models / "student")})
    components = assemble_run(letters, tmp_path)
    with pytest.raises(DataError, match="which the student's tokenizer cannot write"):
        collect(components, "restate(confidence)")
