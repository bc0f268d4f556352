"""Every part of a published method acts: without it the recipe is refused, leaves its formula, or has another reading."""

import json

import pytest

from .parts import METHODS, RESULTS, examine, identify, list_parts, load_stages, switch_off

UNSEEN = {
    "papers/gad": ["scorers.discriminator.warmup_steps: 20"],
    "papers/kepo": ["notes.hint.max_new_tokens: 12"],
    "papers/rlcsd": [
        f"{model}.teacher.{part}"
        for model in ("teacher", "reference")
        for part in ("weights: periodic", "period: 10")
    ],
    "papers/sd-zero": ["notes.revision.correct: {attempt} Let me rephrase the above solution."],
    **{
        f"pipelines/{name}": [
            f"stages.{stage}.notes.experience.writer.teacher.weights: live"
            for stage in ("play_1", "play_2")
        ]
        for name in ("oel", "oel-lake", "oel-sokoban")
    },
    "pipelines/probing-to-refine": [
        f"stages.{stage}.task.{part}"
        for stage, parts in {
            "warm_up": ("lines: True", "task.note: probe", "task.scope: prompt"),
            "refine": ("bonus: 0.5", "lines: True", "task.note: probe", "task.scope: prompt"),
        }.items()
        for part in parts
    ],
    "served/openclaw-rl": ["rollout.max_staleness: 1"],
    "teams/deepseek_v4": [f"stages.{name}_expert.start: sft" for name in ("next", "left", "none")],
}
"""Parts that a small run does not show: its answers are wrong, so it has no probes and experts without a reward; its hints are
short, its discriminator is no judge, a player that does not learn keeps its weights, and its users' turns are recorded. In
tests/rollouts/test_traffic.py users talk during an update."""

RESULT = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", METHODS)
def test_every_part_was_noticed_when_it_was_switched_off(name: str) -> None:
    assert RESULT[name]["of"] == identify(load_stages(name)), (
        f"the recipe changed; run PYTHONPATH=tests python -m papers.parts {name.removeprefix('papers/')}"
    )
    hollow = [part for part, witness in RESULT[name]["parts"].items() if not witness]
    assert hollow == UNSEEN.get(name, [])


@pytest.mark.long
@pytest.mark.parametrize("name", ["papers/gkd", "papers/paced", "papers/opcd", "pipelines/spin"])
def test_the_recorded_parts_are_found_again(name: str) -> None:
    assert examine(name) == RESULT[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_all_recorded_parts_are_found_again(name: str) -> None:
    assert examine(name) == RESULT[name]


def test_a_part_is_a_key_a_term_or_an_argument() -> None:
    method = {
        "rollout": {"source": "join(teacher, 1, filter=failed_group)"},
        "teacher": {"type": "privileged", "reference": "{answer}", "teacher": {"type": "self"}},
        "objective": {"losses": [{"signal": "full"}, {"divergence": "jsd(0.5)"}]},
    }
    parts = dict(list_parts(method))
    assert list(parts.values()) == [
        "rollout.source: join(teacher, 1, filter=failed_group)",
        "rollout.source: filter=failed_group",
        "teacher: privileged",
        "teacher.reference: {answer}",
        "teacher.teacher: self",
        "losses.0: full",
        "losses.0.signal: full",
        "losses.1: full",
        "losses.1.divergence: jsd(0.5)",
    ]
    assert switch_off(method, ("rollout", "source", "filter"))["rollout"] == {
        "source": "join(teacher, 1)"
    }
    assert switch_off(method, ("objective", "losses", 0))["objective"] == {
        "losses": [{"divergence": "jsd(0.5)"}]
    }
    assert switch_off(method, ("teacher", "teacher"))["teacher"] == {
        "type": "privileged",
        "reference": "{answer}",
    }


def test_the_parts_of_a_pipeline_are_its_stages_and_their_keys() -> None:
    task = {"type": "reverse", "shortest": 3}
    stages = {
        "sft": {
            "slot": "cold_start",
            "setting": {"rollout": {"n": 2}},
            "objective": {"signal": "text"},
        },
        "merged": {"start": {"merge": ["sft"], "method": "ties"}},
        "played": {"start": "sft", "task": {"type": "played", "note": "told", "task": task}},
    }
    parts = dict(list_parts({"rollout": {"n": 8}, "stages": stages}, task=task))
    assert list(parts.values()) == [
        "rollout.n: 8",
        "stages.sft",
        "stages.sft.objective.signal: text",
        "stages.merged",
        "stages.merged.start: merge, method",
        "stages.merged.start.merge: ['sft']",
        "stages.merged.start.method: ties",
        "stages.played",
        "stages.played.start: sft",
        "stages.played.task: played",
        "stages.played.task.note: told",
    ]
    assert list(switch_off({"stages": stages}, ("stages", "sft"))["stages"]) == ["merged", "played"]
