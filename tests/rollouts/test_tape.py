"""Rollouts are restored from rollouts.jsonl bit for bit: after a kill, and in another run."""

import json
import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sources import assert_equal
from toy import assert_same_run, curve, forked, rows, toy_recipe, toy_run, write_recipe

from practicum.errors import CheckpointError, DataError, RecipeError
from practicum.rollouts import RolloutArchive, RolloutRow, load_recorded_rollouts, to_exact_floats
from practicum.runs import run
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import AUTHORS, Author, Message, Prompt, Rollout, Turn

REPLAY = {
    "rollout.source": "mix(student=0.4, other=replay)",
    "rollout.replay_size": 12,
    "rollout.n": 2,
    "rollout.temperature": 0.8,
    "objective": {"signal": "sampled", "estimator": "score_function", "correction": "ratio"},
    "train.steps": 6,
    "train.checkpoint_every": 2,
    "train.prompts_per_step": 4,
}
PROMPT = Prompt("p", (Message("user", "ab"),), answer="ba")
NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=False)


def a_rollout(step: int = 1, **changes: Any) -> Rollout:
    rollout = Rollout(
        prompt=PROMPT,
        prompt_tokens=(3, 7, 8, 4),
        tokens=torch.tensor([7, 8, 2]),
        loss_mask=torch.tensor([False, True, True]),
        sampling_logprobs=torch.tensor([0.0, -0.1, -2.0]),
        policy_logprobs=torch.tensor([math.nan, -0.3, -1e-9]),
        policy_version=step - 1,
        stop_reason="stop",
        text="ab",
        reward=0.5,
    )
    return replace(rollout, **changes)


def read_back(row: RolloutRow) -> RolloutRow:
    return RolloutRow.model_validate(json.loads(json.dumps(row.model_dump())))


@given(
    st.lists(NUMBERS, min_size=1, max_size=8), st.sampled_from(["student", "teacher", "dataset"])
)
def test_a_row_brings_its_rollout_back_bit_for_bit(numbers: list[float], source: str) -> None:
    logprobs = torch.tensor(numbers, dtype=torch.float32)
    mask = torch.arange(len(numbers)) % 2 == 0
    tokens = torch.arange(len(numbers))
    rollout = a_rollout(
        tokens=tokens,
        loss_mask=mask,
        sampling_logprobs=logprobs,
        policy_logprobs=-logprobs,
        source=source,
    )
    assert_equal(
        [read_back(RolloutRow.of(4, rollout)).to_rollout(PROMPT)], [replace(rollout, reward=None)]
    )


@given(
    st.lists(st.tuples(st.sampled_from(AUTHORS), st.integers(1, 4)), min_size=1, max_size=6),
    st.text(max_size=6),
)
def test_a_row_brings_authors_turns_and_notes_back(
    runs: list[tuple[Author, int]], text: str
) -> None:
    authors = torch.tensor(
        [AUTHORS.index(author) for author, count in runs for _ in range(count)], dtype=torch.uint8
    )
    known = torch.zeros(len(authors))
    turns = tuple(
        Turn("user" if author == "environment" else "assistant", count, text)
        for author, count in runs
    )
    rollout = a_rollout(
        tokens=torch.arange(len(authors)), loss_mask=known == 0, sampling_logprobs=known, policy_logprobs=known,
        authors=authors, turns=turns, notes={"feedback": text},
    )  # fmt: skip
    row = RolloutRow.model_validate(json.loads(json.dumps(RolloutRow.of(4, rollout).to_json())))
    assert_equal([row.to_rollout(PROMPT)], [replace(rollout, reward=None)])


def test_a_row_of_one_author_says_nothing_about_turns() -> None:
    assert not {"authors", "turns", "notes"} & RolloutRow.of(4, a_rollout()).to_json().keys()


def test_turns_and_authors_that_do_not_add_up_are_refused() -> None:
    row = RolloutRow.of(4, a_rollout()).to_json()
    for more, text in (
        (
            {"authors": [{"author": "student", "tokens": 2}]},
            "authors are of 2 tokens, and there are 3",
        ),
        (
            {"turns": [{"role": "user", "tokens": 4, "text": ""}]},
            "turns are of 4 tokens, and there are 3",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            RolloutRow.model_validate_json(json.dumps(row | more))


def test_digits_are_enough_and_no_more() -> None:
    assert to_exact_floats(torch.tensor([-0.1, 1 / 3, math.nan, math.inf, 0.0])) == [
        -0.100000001,
        0.333333343,
        None,
        None,
        0.0,
    ]


def test_an_archive_is_restored_as_it_was() -> None:
    archive, recorded = RolloutArchive(deque(maxlen=5)), []
    for step in range(1, 5):
        fresh = [
            a_rollout(step, sample=sample, tokens=torch.tensor([step, sample, 2]))
            for sample in range(2)
        ]
        others = [a_rollout(step, source="teacher"), *list(archive.newest)[:1]]
        recorded += [RolloutRow.of(step, rollout).model_dump() for rollout in (*fresh, *others)]
        archive.newest.extend(fresh)
    restored = RolloutArchive(deque([a_rollout()], maxlen=5))
    restored.restore(recorded, [PROMPT], 4)
    assert_equal(
        list(restored.newest), [replace(rollout, reward=None) for rollout in archive.newest]
    )
    with pytest.raises(
        CheckpointError, match=r"ends with step 4 instead of 5.*step 6 may replay are lost"
    ):
        restored.restore(recorded, [PROMPT], 5)
    with pytest.raises(CheckpointError, match=r"no prompt of the run is called 'other'"):
        restored.restore([{**row, "prompt": "other"} for row in recorded], [PROMPT], 4)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["rollout:2", "update:4", "score:6", "save.before_rename:2"])
def test_a_run_that_replays_is_resumed_as_if_it_had_not_stopped(
    models: Path, tmp_path: Path, fault: str
) -> None:
    whole = toy_run(models, tmp_path / "whole", REPLAY).folder
    assert (
        forked(lambda: toy_run(models, tmp_path / "cut", REPLAY), {"PRACTICUM_FAULT": fault}) == 137
    )
    assert_same_run(whole, toy_run(models, tmp_path / "cut", REPLAY, resume=True).folder)
    stale = [
        row for row in rows(whole / "rollouts.jsonl") if row["policy_version"] < row["step"] - 1
    ]
    assert 10 < len(stale) < 40 and {row["step"] for row in stale} == {2, 3, 4, 5, 6}
    assert curve(whole, "staleness")[0] == 0 < min(curve(whole, "staleness")[1:])


SOURCES = [
    "mix(student=0.5, other=teacher)",
    "join(other=dataset)",
    "prefix(length=linear(3, 0), origin=teacher)",
    "token_mix(teacher=0.3)",
]


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_of_any_source_is_resumed_as_if_it_had_not_stopped(
    models: Path, tmp_path: Path, source: str
) -> None:
    changes = {"rollout.source": source, "train.steps": 4, "train.prompts_per_step": 4}
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert (
        forked(lambda: toy_run(models, tmp_path / "cut", changes), {"PRACTICUM_FAULT": "update:4"})
        == 137
    )
    assert_same_run(whole, toy_run(models, tmp_path / "cut", changes, resume=True).folder)


def test_a_run_whose_tape_is_gone_replays_nothing_else(models: Path, tmp_path: Path) -> None:
    assert forked(lambda: toy_run(models, tmp_path, REPLAY), {"PRACTICUM_FAULT": "update:4"}) == 137
    (tmp_path / "toy" / "rollouts.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"rollouts\.jsonl cannot be read: No such file"):
        toy_run(models, tmp_path, REPLAY, resume=True)


def test_a_cache_reports_what_the_source_of_its_rollouts_reports(
    models: Path, tmp_path: Path
) -> None:
    searched = {"rollout.source": "search(breadth=2, step=word)", "rollout.n": 4, "train.steps": 2}
    earlier = toy_run(models, tmp_path / "earlier", searched).folder
    cached = {**searched, "rollout.source": f"cache({earlier / 'rollouts.jsonl'})"}
    later = toy_run(models, tmp_path / "later", cached).folder
    names = [
        {name for name in rows(folder / "metrics.jsonl")[0] if name.startswith("search_")}
        for folder in (earlier, later)
    ]
    assert names[0] == names[1] != set()


def test_a_cache_replays_an_earlier_run_token_for_token(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    path = write_recipe(
        models, tmp_path / "r.yaml", {"rollout.source": "cache(earlier/rollouts.jsonl)"}
    )
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "rollouts.jsonl").write_bytes(
        (finished / "rollouts.jsonl").read_bytes()
    )
    folder = run(path, out=tmp_path / "out").folder
    kept = (
        "step",
        "prompt",
        "sample",
        "source",
        "text",
        "stop_reason",
        "prompt_tokens",
        "tokens",
        "loss_mask",
    )
    kept += ("sampling_logprobs", "policy_logprobs", "reward")
    old, new = rows(finished / "rollouts.jsonl"), rows(folder / "rollouts.jsonl")
    assert [{key: row[key] for key in kept} for row in new] == [
        {key: row[key] for key in kept} for row in old
    ]
    assert curve(folder, "staleness") == [0.0, 1.0, 2.0, 3.0]


def test_a_tape_stands_in_for_sampler_and_teacher(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    """Check Lightning OPD (2604.13010): nothing is sampled and no teacher is loaded."""
    tape = finished / "rollouts.jsonl"
    changes = {
        "rollout.source": f"cache({tape})",
        "teacher": {"type": "scripted", "tape": str(tape)},
    }
    changes["objective"] = {
        "signal": "sampled",
        "estimator": "score_function",
        "correction": "ratio",
    }
    folder = toy_run(models, tmp_path, changes).folder
    recorded, replayed = rows(tape), rows(folder / "rollouts.jsonl")
    assert [row["teacher_logprobs"] for row in replayed] == [
        row["teacher_logprobs"] for row in recorded
    ]


@pytest.mark.long
def test_a_cached_run_is_resumed_on_the_same_tape_only(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    tape = tmp_path / "tape.jsonl"
    tape.write_bytes((finished / "rollouts.jsonl").read_bytes())
    changes = {"rollout.source": f"cache({tape})"}
    whole = toy_run(models, tmp_path / "whole", changes).folder
    for out in ("same", "other"):
        assert (
            forked(
                lambda out=out: toy_run(models, tmp_path / out, changes),
                {"PRACTICUM_FAULT": "update:3"},
            )
            == 137
        )
    assert_same_run(whole, toy_run(models, tmp_path / "same", changes, resume=True).folder)
    tape.write_bytes(b"")
    with pytest.raises(RecipeError, match="since the run began, tape changed;"):
        toy_run(models, tmp_path / "other", changes, resume=True)


def test_every_recorded_completion_of_a_prompt_has_its_turn(models: Path, tmp_path: Path) -> None:
    earlier = toy_run(models, tmp_path / "a", {"rollout.n": 4, "train.steps": 2}).folder
    source = {
        "rollout.source": f"cache({earlier / 'rollouts.jsonl'})",
        "rollout.n": 4,
        "train.steps": 2,
    }
    later = toy_run(models, tmp_path / "b", source).folder

    def by_prompt(folder: Path) -> dict[str, list[list[int]]]:
        found: dict[str, list[list[int]]] = {}
        for row in rows(folder / "rollouts.jsonl"):
            found.setdefault(row["prompt"], []).append(row["tokens"])
        return {prompt: sorted(tokens) for prompt, tokens in found.items()}

    assert by_prompt(earlier) == by_prompt(later)
    with pytest.raises(
        DataError,
        match=r"holds 4 completions of prompt '\w+', and rollout\.n asks for 5; record more",
    ):
        toy_run(models, tmp_path / "c", {**source, "rollout.n": 5})
    with pytest.raises(DataError, match=r"holds 0 completions of prompt '\w+'"):
        toy_run(models, tmp_path / "d", {**source, "seed": 1, "task.train_size": 60})


@pytest.fixture(scope="module")
def built(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models), tmp_path_factory.mktemp("models"))


GOOD = RolloutRow.of(1, a_rollout()).model_dump()
BROKEN: dict[str, tuple[str, str]] = {
    "no JSON": ("what?", "row 1 is not a recorded rollout"),
    "no object": ("[1]", "row 1 is not a recorded rollout"),
    "a column is missing": (
        json.dumps({**GOOD, "tokens": None}),
        r"row 1 is not a recorded rollout \(tokens: ",
    ),
    "a negative token": (json.dumps({**GOOD, "tokens": [7, -1, 2]}), r"\(tokens\.1: "),
    "a text for a number": (
        json.dumps({**GOOD, "sampling_logprobs": ["a", 0, 0]}),
        r"\(sampling_logprobs\.0: ",
    ),
    "unequal columns": (
        json.dumps({**GOOD, "tokens": [7, 2]}),
        r"differ in length\); give an unmodified rollouts\.jsonl",
    ),
    "another question": (
        json.dumps({**GOOD, "prompt_tokens": [3, 7, 4]}),
        r"row 1 answers a different prompt than the 'p' of this run",
    ),
    "too long": (
        json.dumps(GOOD),
        r"row 1 has 3 tokens; raise rollout\.max_new_tokens, which is 2",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_tape_that_cannot_be_replayed_names_its_row(
    built: RunComponents, tmp_path: Path, name: str
) -> None:
    text, message = BROKEN[name]
    tape = tmp_path / "tape.jsonl"
    tape.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_recorded_rollouts(tape, [PROMPT], built.parts.renderer, 2)


def test_a_tape_that_is_not_there_is_named(built: RunComponents, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the tape .*gone\.jsonl cannot be read \(No such file"):
        load_recorded_rollouts(tmp_path / "gone.jsonl", [PROMPT], built.parts.renderer, 5)


def test_rows_of_other_prompts_are_passed_over(built: RunComponents, tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    tape.write_text(
        json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "prompt": "q"}) + "\n", encoding="utf-8"
    )
    found = load_recorded_rollouts(tape, [PROMPT], built.parts.renderer, 5)
    assert_equal(found["p"], [a_rollout(reward=None)])
    assert found.keys() == {"p"}
