"""A stream of prompts with a shifting topic: its order, also after a resume."""

from pathlib import Path

import pytest
from toy import assert_same_run, forked, rows, toy_data, toy_run

from practicum.errors import RecipeError
from practicum.methods.editors.topics import Config, build
from practicum.ports import TaskContext
from practicum.recipe import parse_recipe
from practicum.rollouts import select_prompts

LETTERS = ["abcd", "efgh"]


def test_each_topic_is_read_after_the_topic_before_it(tmp_path):
    task = build(Config(topics=LETTERS, train_size=20, heldout_size=3), TaskContext(0, tmp_path))
    prompts = task.train_prompts()
    assert task.is_stream and len(prompts) == 40 and len(task.heldout_prompts()) == 6
    steps = [select_prompts(prompts, 0, step, 10, in_order=task.is_stream) for step in range(1, 6)]
    topics = [{letter for p in step for letter in p.answer} <= set("abcd") for step in steps]
    assert topics == [True, True, False, False, True]
    assert steps[4] == steps[0]
    assert [p.id for step in steps[:4] for p in step] == [p.id for p in prompts]
    assert not {p.id for p in prompts} & {p.id for p in task.heldout_prompts()}


def test_topics_that_share_letters_share_no_heldout_string(tmp_path):
    topics = ["abcdef", "cdefgh", "efghab", "ghabcd"]
    config = Config(topics=topics, shortest=3, longest=4, train_size=1280, heldout_size=16)
    task = build(config, TaskContext(0, tmp_path))
    train, heldout = task.train_prompts(), task.heldout_prompts()
    assert len(train) == 5120 and len(heldout) == 64
    assert not {p.answer for p in train} & {p.answer for p in heldout}
    assert len({p.id for p in [*train, *heldout]}) == 5184
    assert {p.id.partition("-")[0] for p in heldout[:4]} == set("0123")


def test_too_few_letters_for_a_topic_are_refused():
    data = toy_data(Path("models"), {"task": {"type": "topics", "topics": ["ab"]}})
    with pytest.raises(RecipeError, match="2 letters make only"):
        parse_recipe(data, "recipe.yaml")


@pytest.mark.long
def test_a_killed_run_on_a_stream_ends_with_the_same_bytes(models, tmp_path):
    changes = {
        "rollout.source": "speculative(2)",
        "objective": {"signal": "full", "divergence": "forward_kl", "source": "teacher"},
        "task": {"type": "topics", "topics": ["abcd", "efgh"], "train_size": 8, "heldout_size": 4},
    }
    toy_run(models, tmp_path / "whole", changes)
    killed = tmp_path / "killed"
    assert forked(lambda: toy_run(models, killed, changes), {"PRACTICUM_FAULT": "update:3"}) == 137
    toy_run(models, killed, changes, resume=True)
    assert_same_run(tmp_path / "whole" / "toy", killed / "toy")
    authors = [row.get("authors") for row in rows(killed / "toy" / "rollouts.jsonl")]
    assert any(runs and len(runs) > 1 for runs in authors)
