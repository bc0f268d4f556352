"""The pace of each phase against the run's own beginning."""

from practicum.monitors.pace import BASELINE_STEPS, PERSISTENCE, PhaseSpeedMonitor


def step(sample: float, update: float = 1.0, length: float = 5.0) -> dict[str, float]:
    return {"rollouts": 2.0, "length": length, "seconds_sample": sample, "seconds_update": update}


def test_a_phase_that_slows_down_is_named_once_after_some_steps() -> None:
    pace = PhaseSpeedMonitor()
    assert [line for _ in range(BASELINE_STEPS) for line in pace.judge(step(1.0))] == []
    said = [pace.judge(step(3.0)) for _ in range(2 * PERSISTENCE)]
    assert [len(lines) for lines in said] == [0] * (PERSISTENCE - 1) + [1] + [0] * PERSISTENCE
    assert said[PERSISTENCE - 1] == [
        "M25 pace: sample takes 3 times the seconds per token of the first 10 steps"
    ]
    assert not any(pace.judge(step(0.1)) for _ in range(PERSISTENCE)), (
        "back, and faster is nothing to worry about"
    )
    assert sum(len(pace.judge(step(3.0))) for _ in range(2 * PERSISTENCE)) == 1, (
        "it slows down again"
    )


def test_a_clock_that_goes_up_and_down_is_told_once() -> None:
    pace = PhaseSpeedMonitor()
    for _ in range(BASELINE_STEPS):
        pace.judge(step(1.0))
    busy = [3.0] * PERSISTENCE + [1.0, 3.0] * 20
    assert sum(len(pace.judge(step(seconds))) for seconds in busy) == 1


def test_a_phase_that_takes_next_to_nothing_is_passed_over() -> None:
    pace = PhaseSpeedMonitor()
    for _ in range(BASELINE_STEPS):
        pace.judge(step(1e-5))
    assert not any(pace.judge(step(1e-3)) for _ in range(3 * PERSISTENCE))


def test_longer_answers_take_longer_and_one_slow_step_says_nothing() -> None:
    pace = PhaseSpeedMonitor()
    for _ in range(BASELINE_STEPS):
        pace.judge(step(1.0))
    assert not any(pace.judge(step(4.0, 4.0, length=20.0)) for _ in range(2 * PERSISTENCE))
    assert not any(
        pace.judge(step(9.0 if number % PERSISTENCE == 0 else 1.0)) for number in range(20)
    )


def test_a_step_without_tokens_or_clock_is_passed_over() -> None:
    assert (
        PhaseSpeedMonitor().judge({"rollouts": 0.0, "length": 0.0, "seconds_sample": 1.0})
        == []
        == PhaseSpeedMonitor().judge({})
    )


def test_overlapping_phases_are_judged_as_one() -> None:
    pace = PhaseSpeedMonitor(overlapping=True)
    for number in range(BASELINE_STEPS + 2 * PERSISTENCE):
        assert pace.judge(step(float(number % 2), 1.0 - number % 2)) == [], (
            "now this is waited for, now that"
        )
    said = [line for _ in range(PERSISTENCE) for line in pace.judge(step(2.0))]
    assert said == ["M25 pace: step takes 3 times the seconds per token of the first 10 steps"]
