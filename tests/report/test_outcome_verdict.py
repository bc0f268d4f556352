"""The verdict of a run: expected outcomes written before the rules were run, and laws."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.report.outcome_verdict import (
    RunSettings,
    format_verdict,
    judge_run,
    list_commands,
)

DIVERGENCE = RunSettings(learning_rate=0.002, prompts=64, steps=20, aims_at_teacher=True)
REWARD = RunSettings(learning_rate=0.002, prompts=64, steps=20, aims_at_teacher=False)

RANKS = {
    "COLLAPSED": 0,
    "WORSE": 1,
    "NO DETECTABLE CHANGE": 2,
    "TOO FEW PROMPTS": 2,
    "BETTER": 3,
}
Pair = tuple[float, float]


def summarize(
    prompts: int,
    accuracy: Pair | None = None,
    gain: Pair | None = None,
    *,
    kl: Pair | None = None,
    estimate: tuple[tuple[float, float | None], tuple[float, float | None]] | None = None,
    cut: Pair = (0.0, 0.0),
    entropy: Pair | None = (1.0, 1.0),
    equal: Pair = (0.1, 0.1),
    loops: Pair = (0.0, 0.0),
    alarms: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the part of a summary that the verdict reads; each pair is before and after."""
    columns = [
        {
            "prompts": prompts,
            "accuracy": None
            if accuracy is None
            else {"mean": accuracy[when], "low": 0.0, "high": 1.0},
            "reverse_kl": None if kl is None else kl[when],
            "reverse_kl_estimate": None
            if estimate is None
            else {"mean": estimate[when][0], "se": estimate[when][1]},
            "student_entropy_estimate": None,
            "truncated": cut[when],
            "student_entropy": None if entropy is None else entropy[when],
            "equal_answers": equal[when],
            "looping_answers": loops[when],
        }
        for when in (0, 1)
    ]
    measured = None
    if accuracy is not None and gain is not None:
        measured = {"mean": accuracy[1] - accuracy[0], "low": gain[0], "high": gain[1]}
    return {
        "before": columns[0] if prompts else None,
        "after": columns[1] if prompts else None,
        "gain": measured,
        "alarms": dict(alarms or {}),
    }


NOTHING_RIGHT = ((0.0, 0.0), (-0.24, 0.24))

EXPECTED = {
    "COLLAPSED": {
        "a GKD run at the learning rate of a toy, without an alarm": (
            summarize(12, *NOTHING_RIGHT, kl=(0.368, 5.656), cut=(1.0, 1.0), equal=(0.1, 0.7)),
            DIVERGENCE,
        ),
        "smoke/toy at a learning rate of 0.3": (
            summarize(
                64, (0.05, 0.0), (-0.12, 0.01), kl=(0.7, 3.45), cut=(0.0, 1.0),
                entropy=(1.1, 0.0), equal=(0.05, 1.0), loops=(0.0, 1.0),
                alarms={"M3": 1, "M12": 1, "M29": 1},
            ),
            DIVERGENCE,
        ),
        "a reward and no teacher: long loops": (
            summarize(
                32, (0.2, 0.03), (-0.3, -0.05), cut=(0.05, 1.0), loops=(0.0, 0.95), entropy=None
            ),
            REWARD,
        ),
        "few prompts, but fifteen times the divergence": (
            summarize(4, (0.0, 0.0), (-0.6, 0.6), kl=(0.368, 5.656)), DIVERGENCE
        ),
        "no verifier, ten times the divergence": (summarize(32, kl=(0.4, 4.1)), DIVERGENCE),
        "closer to the teacher, because a loop is easy to predict": (
            summarize(32, (0.3, 0.2), (-0.3, 0.1), kl=(0.8, 0.3), cut=(0.1, 1.0), loops=(0.0, 1.0)),
            DIVERGENCE,
        ),
        "a reward: the same answer to every prompt": (
            summarize(
                64, (0.1, 0.1), (-0.08, 0.08), entropy=(1.2, 0.0), equal=(0.05, 1.0)
            ),
            REWARD,
        ),
        "nothing right any more, answers cut, twice the divergence": (
            summarize(36, (0.6, 0.0), (-0.75, -0.42), kl=(0.3, 0.9), cut=(0.0, 0.9)), DIVERGENCE
        ),
    },
    "WORSE": {
        "the doctor's corrected GKD run": (
            summarize(12, *NOTHING_RIGHT, kl=(0.368, 0.822), cut=(1.0, 1.0)), DIVERGENCE
        ),
        "less accurate, as near to the teacher": (
            summarize(64, (0.8, 0.5), (-0.42, -0.18), kl=(0.3, 0.31)), DIVERGENCE
        ),
        "less accurate, nearer to a bad teacher": (
            summarize(64, (0.5, 0.3), (-0.32, -0.08), kl=(0.4, 0.2)), DIVERGENCE
        ),
        "no verifier, half as far again": (summarize(64, kl=(0.4, 0.6)), DIVERGENCE),
        "a reward, less accurate": (summarize(64, (0.7, 0.4), (-0.42, -0.18)), REWARD),
        "answers that no longer end": (
            summarize(64, (0.9, 0.2), (-0.8, -0.55), kl=(0.3, 0.33), cut=(0.0, 0.9)), DIVERGENCE
        ),
        "accuracy unresolved, far from the teacher": (
            summarize(64, (0.5, 0.55), (-0.06, 0.16), kl=(0.2, 0.5)), DIVERGENCE
        ),
    },
    "NO DETECTABLE CHANGE": {
        "a short toy": (
            summarize(12, (0.08, 0.17), (-0.15, 0.33), kl=(0.7, 0.68)), DIVERGENCE
        ),
        "the GKD run at 5e-4": (summarize(12, *NOTHING_RIGHT, kl=(0.368, 0.359)), DIVERGENCE),
        "a reward that moves away from its teacher without a loss": (
            summarize(64, (0.4, 0.43), (-0.05, 0.11), kl=(0.1, 0.9)), REWARD
        ),
        "divergences too small to matter": (summarize(64, kl=(0.001, 0.0013)), DIVERGENCE),
        "negative estimates of a divergence": (summarize(64, kl=(-0.002, 0.004)), DIVERGENCE),
        "right before and after": (
            summarize(64, (1.0, 1.0), (-0.06, 0.06), kl=(0.02, 0.021)), DIVERGENCE
        ),
        "an interval of zero width": (summarize(16, (0.3, 0.5), (0.2, 0.2)), REWARD),
        "neither a verifier nor a teacher": (summarize(16, entropy=None), REWARD),
        "nearer to the teacher, but most answers are cut": (
            summarize(64, (0.3, 0.3), (-0.1, 0.1), kl=(0.8, 0.5), cut=(0.0, 0.8)), DIVERGENCE
        ),
    },
    "BETTER": {
        "the toy that works": (
            summarize(64, (0.08, 0.86), (0.67, 0.87), kl=(0.7, 0.1)), DIVERGENCE
        ),
        "the GKD run at 5e-5": (
            summarize(12, *NOTHING_RIGHT, kl=(0.368, 0.078), cut=(1.0, 1.0)), DIVERGENCE
        ),
        "a reward without a teacher": (summarize(64, (0.15, 0.7), (0.42, 0.66)), REWARD),
        "more accurate, further from the teacher": (
            summarize(64, (0.3, 0.6), (0.17, 0.42), kl=(0.2, 0.4)), DIVERGENCE
        ),
        "no verifier, a quarter of the divergence": (
            summarize(64, entropy=(2.0, 1.4), kl=(1.2, 0.3)), DIVERGENCE
        ),
        "two classes, and sure of them": (
            summarize(
                64, (0.5, 0.9), (0.27, 0.52), kl=(0.9, 0.1), entropy=(0.7, 0.001), equal=(0.4, 0.95)
            ),
            DIVERGENCE,
        ),
        "a constant teacher is learned": (
            summarize(64, kl=(0.9, 0.05), entropy=(0.9, 0.001), equal=(0.1, 1.0)), DIVERGENCE
        ),
    },
    "TOO FEW PROMPTS": {
        # Three of four prompts became wrong: Tango's interval contains zero, and with so few tokens
        # the divergence may be luck. The reasons state that both point to worse.
        "four capitals": (
            summarize(4, (1.0, 0.25), (-0.95, 0.04), kl=(0.445, 0.652)), DIVERGENCE
        ),
        "two prompts, both right now": (summarize(2, (0.0, 1.0), (-0.3, 1.0)), REWARD),
        "no held-out prompts": (summarize(0), DIVERGENCE),
        "nine prompts": (
            summarize(9, (0.1, 0.9), (0.4, 1.0), kl=(0.5, 0.1)), DIVERGENCE
        ),
        "six prompts and no verifier": (summarize(6, kl=(0.4, 0.3)), DIVERGENCE),
        "four answers that became equal": (
            summarize(4, (0.5, 0.5), (-0.6, 0.6), equal=(0.25, 1.0)), REWARD
        ),
        "three answers of low entropy": (
            summarize(3, (0.3, 0.3), (-0.6, 0.6), kl=(0.3, 0.28), entropy=(1.0, 0.01)), DIVERGENCE
        ),
    },
}  # fmt: skip
"""Summaries with the numbers of real runs, by the verdict that a careful reader would give."""


@pytest.mark.parametrize("verdict", list(EXPECTED))
def test_verdicts_are_those_of_a_careful_reader(verdict: str) -> None:
    judged = {name: judge_run(*case) for name, case in EXPECTED[verdict].items()}
    assert {name: found.verdict for name, found in judged.items()} == dict.fromkeys(judged, verdict)
    assert all(found.reasons and all(found.reasons) for found in judged.values())
    assert all(found.next for name, found in judged.items() if verdict != "BETTER")


def test_reasons_name_the_numbers_and_the_next_command() -> None:
    collapsed = judge_run(
        *EXPECTED["COLLAPSED"]["a GKD run at the learning rate of a toy, without an alarm"]
    )
    assert "reverse KL to the teacher 15 times as high (0.37 to 5.66)" in collapsed.reasons
    assert "practicum run RUN optimizer.learning_rate=0.0002" in collapsed.next
    toy = judge_run(*EXPECTED["COLLAPSED"]["smoke/toy at a learning rate of 0.3"]).reasons
    assert "100 % of the answers cut off (0 % before)" in toy
    assert "100 % of the prompts got the same answer (5 % before)" in toy
    assert "alarms: M3, M12, M29" in toy
    summary, settings = EXPECTED["TOO FEW PROMPTS"]["four capitals"]
    assert judge_run(summary, settings).next == ["add held-out prompts to the task, which has 4"]
    few = judge_run(summary, replace(settings, prompts=4))
    assert "both point to worse" in few.reasons[-1]
    assert "practicum run RUN evaluation.prompts=64" in few.next
    mixed = judge_run(*EXPECTED["BETTER"]["more accurate, further from the teacher"]).reasons
    assert mixed[0].startswith("accuracy 0.30 to 0.60") and "2.0 times as high" in mixed[1]
    equal = judge_run(*EXPECTED["NO DETECTABLE CHANGE"]["an interval of zero width"]).reasons
    assert "all prompts agree; no interval" in equal[0]


@pytest.mark.parametrize(
    ("low", "high", "prompts", "word"),
    [
        (0.7, 0.9, 64, "BETTER"),
        (-0.3, -0.1, 64, "WORSE"),
        (-0.1, 0.2, 64, "NO DETECTABLE CHANGE"),
        (0.7, 0.9, 6, "TOO FEW PROMPTS"),
    ],
)
def test_a_drafter_is_judged_by_tokens_per_target_call(
    low: float, high: float, prompts: int, word: str
) -> None:
    # Accuracy points the other way: by chance, because the target is frozen.
    opposite = (-0.3, -0.1) if low > 0 else (0.1, 0.3)
    summary = summarize(prompts, (0.5, 0.5 + sum(opposite) / 2), opposite, kl=(0.0, 0.0))
    mean = (low + high) / 2
    for when, calls, share in (("before", 1.07, 0.08), ("after", 1.07 + mean, 0.65)):
        summary[when] |= {"drafts/tokens_per_call": calls, "drafts/acceptance": share}
    summary["draft_gain"] = {"mean": mean, "low": low, "high": high}
    judged = judge_run(summary, DIVERGENCE)
    assert judged.verdict == word
    assert judged.reasons[0].startswith(f"1.07 to {1.07 + mean:.2f} tokens per target call")
    assert judged.reasons[1] == "acceptance 0.08 to 0.65"
    assert not any("accuracy" in reason or "KL" in reason for reason in judged.reasons)
    if word == "BETTER":
        line = format_verdict(asdict(judged), "runs/toy")
        assert line == (
            "BETTER: 1.07 to 1.87 tokens per target call (+0.80 [+0.70, +0.90]); acceptance 0.08 to 0.65"
        )


def test_the_rate_to_try_is_that_of_the_table_where_the_rate_was_far_above_it() -> None:
    summary, settings = EXPECTED["COLLAPSED"]["no verifier, ten times the divergence"]
    toy = replace(settings, learning_rate=0.002)
    rates = {usual: judge_run(summary, replace(toy, usual_rate=usual)) for usual in (5e-5, 1e-3)}
    assert rates[5e-5].next[0] == "practicum run RUN optimizer.learning_rate=5e-05"
    assert rates[1e-3].next[0] == "practicum run RUN optimizer.learning_rate=0.0002"


def test_commands_name_the_folder_of_the_run() -> None:
    verdict = asdict(judge_run(*EXPECTED["WORSE"]["a reward, less accurate"]))
    assert list_commands(verdict, "my runs/RUN 1")[0] == "practicum doctor 'my runs/RUN 1'"
    assert format_verdict(verdict, "runs/toy").endswith(". Try next: practicum doctor runs/toy")
    assert format_verdict({**verdict, "next": []}, "runs/toy").startswith("WORSE: accuracy")


SHARES = st.floats(0.0, 1.0)
DIVERGENCES = st.floats(-0.1, 8.0)


@st.composite
def summaries(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the numbers of a run with a divergence, and perhaps an accuracy."""
    accuracy = draw(st.none() | st.tuples(SHARES, SHARES))
    gain = None
    if accuracy is not None:
        mean, width = accuracy[1] - accuracy[0], draw(st.floats(0.0, 0.5))
        gain = (mean - width, mean + width)
    pairs = {name: draw(st.tuples(SHARES, SHARES)) for name in ("cut", "equal", "loops", "entropy")}
    divergences = draw(st.tuples(DIVERGENCES, DIVERGENCES))
    return summarize(draw(st.integers(1, 100)), accuracy, gain, kl=divergences, **pairs)


@given(summaries(), st.floats(0.0, 8.0), st.sampled_from([DIVERGENCE, REWARD]))
def test_a_higher_divergence_never_improves_the_verdict(
    summary: dict[str, Any], increase: float, settings: RunSettings
) -> None:
    after = {**summary["after"], "reverse_kl": summary["after"]["reverse_kl"] + increase}
    before, raised = (judge_run(each, settings) for each in (summary, {**summary, "after": after}))
    assert RANKS[raised.verdict] <= RANKS[before.verdict]


@given(summaries(), st.integers(0, 500), st.sampled_from([DIVERGENCE, REWARD]))
def test_more_prompts_never_leave_a_verdict_too_few(
    summary: dict[str, Any], more: int, settings: RunSettings
) -> None:
    prompts = summary["before"]["prompts"] + more
    larger = {when: {**summary[when], "prompts": prompts} for when in ("before", "after")}
    if judge_run(summary, settings).verdict != "TOO FEW PROMPTS":
        assert judge_run({**summary, **larger}, settings).verdict != "TOO FEW PROMPTS"


@given(summaries(), st.floats(0.0, 1.0), st.sampled_from([DIVERGENCE, REWARD]))
def test_a_higher_gain_never_worsens_the_verdict(
    summary: dict[str, Any], more: float, settings: RunSettings
) -> None:
    if summary["gain"] is None:
        return
    gain = {end: number + more for end, number in summary["gain"].items()}
    lower, higher = (judge_run(each, settings) for each in (summary, {**summary, "gain": gain}))
    assert RANKS[higher.verdict] >= RANKS[lower.verdict]


def test_an_estimated_divergence_counts_beyond_its_error() -> None:
    for error, verdict in (
        (0.02, "WORSE"),
        (0.2, "NO DETECTABLE CHANGE"),
        (None, "NO DETECTABLE CHANGE"),
    ):
        summary = summarize(64, estimate=((0.3, error), (0.5, error)))
        judged = judge_run(summary, DIVERGENCE)
        assert judged.verdict == verdict
        assert "estimated reverse KL" in judged.reasons[0]
    exact = judge_run(summarize(64, kl=(0.3, 0.5)), DIVERGENCE)
    assert exact.verdict == "WORSE" and "estimated" not in exact.reasons[0]
