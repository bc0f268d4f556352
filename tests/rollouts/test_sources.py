"""Every source of rollouts: the author of each token, its log-probabilities, and the limit cases of each source."""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from toy import curve, rows, toy_data, toy_recipe, toy_run

from practicum.cli.listing import list_names
from practicum.core.plugins import list_plugins
from practicum.core.randomness import seed_of
from practicum.errors import CapabilityError, DataError, RecipeError
from practicum.objective import Full, Sampled, Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    SamplingClient,
    Teacher,
    TeacherRequest,
)
from practicum.recipe import Recipe, parse_recipe, resolve_recipe
from practicum.recipe.schedule import ScheduleState
from practicum.rollouts import (
    SOURCES,
    RolloutArchive,
    RolloutBatch,
    RolloutWriters,
    SourceChoice,
    add_rewards,
    collect_rollouts,
    sample_rollouts,
)
from practicum.rollouts.sources.student import Config as StudentSource
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.teaching.client import ClientTeacher
from practicum.training.loop import measure_rollouts
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
)

EXACT = {"rtol": 1e-5, "atol": 2e-5}
LIMIT = 5
WRITTEN = [
    "student",
    "dataset",
    "teacher",
    "mix(student=0.25, other=teacher)",
    "mix(student=0.75, other=replay)",
    "join(other=teacher, n=2)",
    "join(other=dataset+reference, n=1, student=0)",
    "reference",
    "token_mix(teacher=0.4)",
    "prefix(length=2, origin=dataset)",
    "cache(path=../earlier/rollouts.jsonl)",
]


@pytest.fixture(scope="module")
def built(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    recipe = toy_recipe(models, {"reference": {"type": "self", "weights": "frozen"}})
    return assemble_run(recipe, tmp_path_factory.mktemp("models"))


Write = Callable[..., list[Rollout]]


@pytest.fixture
def write(built: RunComponents) -> Write:
    """Write a batch of seven prompts, one of them twice, from a source."""

    def written(
        source: str,
        *,
        step: int = 3,
        n: int = 2,
        seed: int = 0,
        prompts: Sequence[Prompt] | None = None,
        teacher: Teacher | None = None,
        archive: RolloutArchive | None = None,
        **params: Any,
    ) -> list[Rollout]:
        stops = built.parts.renderer.stop_ids
        batch = RolloutBatch(
            [*built.parts.prompts[:6], built.parts.prompts[2]] if prompts is None else prompts,
            n,
            seed,
            step,
        )
        authors = RolloutWriters(
            built.trainer.build_sampling_client(),
            teacher or built.parts.teacher,
            built.parts.renderer,
            archive or RolloutArchive(),
            reference=built.parts.reference,
            task=built.parts.task,
        )
        settings = SamplingParams(**{"max_new_tokens": LIMIT, "stop_ids": stops, **params})
        return collect_rollouts(
            batch, TypeAdapter(SourceChoice).validate_python(source), authors, settings
        )

    return written


def assert_equal(one: Sequence[Rollout], other: Sequence[Rollout]) -> None:
    """Assert that rollouts are equal, bit for bit."""
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        same = (
            "prompt",
            "prompt_tokens",
            "policy_version",
            "stop_reason",
            "text",
            "sample",
            "reward",
            "source",
            "turns",
        )
        for name in (*same, "notes"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert all(
            mine.mark_tokens_by(author).equal(theirs.mark_tokens_by(author)) for author in AUTHORS
        )
        for name in ("tokens", "loss_mask", "sampling_logprobs", "policy_logprobs"):
            torch.testing.assert_close(
                getattr(mine, name), getattr(theirs, name), rtol=0, atol=0, equal_nan=True
            )


def test_the_student_alone_is_plain_sampling(built: RunComponents, write: Write) -> None:
    batch = RolloutBatch([*built.parts.prompts[:6], built.parts.prompts[2]], 2, 0, 3)
    plain = sample_rollouts(
        batch,
        built.trainer.build_sampling_client(),
        built.parts.renderer,
        built.settings.plan(1).sampling,
    )
    assert_equal(plain, write("student"))
    assert all(rollout.source == "student" and rollout.loss_mask.all() for rollout in plain)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("limit", "source"),
    [
        ("mix(student=1.0, other=dataset)", "student"),
        ("mix(student=1.0, other=replay)", "student"),
        ("mix(student=0.0, other=teacher)", "teacher"),
        ("mix(student=0.0, other=dataset)", "dataset"),
        ("mix(student=0.0, other=replay)", "student"),  # there is nothing to replay yet
        ("token_mix(teacher=0.0)", "student"),
        ("prefix(length=0, origin=teacher)", "student"),
        ("prefix(length=0, origin=dataset)", "student"),
    ],
)
def test_the_ends_of_a_source_are_other_sources_bit_for_bit(
    write: Write, limit: str, source: str, seed: int
) -> None:
    params = {"temperature": 0.9, "top_k": 8, "seed": seed}
    assert_equal(write(limit, **params), write(source, **params))


@pytest.mark.parametrize("source", [source for source in WRITTEN if not source.startswith("cache")])
def test_a_rollout_does_not_depend_on_the_other_prompts_of_its_step(
    built: RunComponents, write: Write, source: str
) -> None:
    prompts = built.parts.prompts[:8]
    together = write(source, prompts=prompts)
    apart = [rollout for prompt in prompts[::-1] for rollout in write(source, prompts=[prompt])]
    rollouts_by_key = {(rollout.prompt.id, rollout.sample): rollout for rollout in apart}
    assert len(rollouts_by_key) == len(together)
    for rollout in together:
        alone = rollouts_by_key[rollout.prompt.id, rollout.sample]
        assert rollout.tokens.equal(alone.tokens) and rollout.loss_mask.equal(alone.loss_mask)
        assert (rollout.source, rollout.text) == (alone.source, alone.text)


def test_a_given_response_is_learned_from_as_it_stands(write: Write) -> None:
    prompts = [
        asked("a", answer="dcba"),
        asked("b", answer="a", response="dd"),
        asked("c", response="abcdabcd"),
    ]
    first, second, third = write("dataset", n=1, prompts=prompts)
    assert [rollout.text for rollout in (first, second, third)] == ["dcba", "dd", "abcda"]
    assert [rollout.stop_reason for rollout in (first, second, third)] == ["stop", "stop", "length"]
    assert [len(rollout.tokens) for rollout in (first, second, third)] == [5, 3, 5]
    for rollout in (first, second, third):
        assert rollout.source == "dataset" and rollout.loss_mask.all()
        assert (rollout.sampling_logprobs == 0).all() and rollout.policy_logprobs.isnan().all()


def test_a_response_ends_in_exactly_one_stop_token(built: RunComponents, write: Write) -> None:
    stops = built.parts.renderer.stop_ids
    for rollout in write("dataset", n=1, prompts=built.parts.prompts):
        assert [token in stops for token in rollout.tokens.tolist()] == [False] * (
            len(rollout.tokens) - 1
        ) + [True]
        assert rollout.text == rollout.prompt.answer


def test_a_prompt_without_anything_to_learn_from_is_named(write: Write) -> None:
    for source in ("dataset", "prefix(2, origin=dataset)", "join(dataset)"):
        with pytest.raises(
            DataError, match=r"prompt 'lost' has neither a response nor an answer.*source: student"
        ):
            write(source, prompts=[asked("lost")])


def test_a_response_that_goes_on_after_a_stop_token_is_named(built: RunComponents) -> None:
    renderer = replace(built.parts.renderer, stop_ids=frozenset(built.parts.renderer.encode("a")))
    authors = RolloutWriters(built.trainer.build_sampling_client(), built.parts.teacher, renderer)
    source = TypeAdapter(SourceChoice).validate_python("dataset")
    with pytest.raises(DataError, match=r"response of prompt 'x' has a stop token before its end"):
        collect_rollouts(
            RolloutBatch([asked("x", answer="bab")], 1, 0, 1), source, authors, SamplingParams(9)
        )
    (fine,) = collect_rollouts(
        RolloutBatch([asked("x", answer="bba")], 1, 0, 1), source, authors, SamplingParams(9)
    )
    assert len(fine.tokens) == 3 and fine.stop_reason == "stop"


def test_what_the_teacher_writes_has_its_own_log_probabilities(
    built: RunComponents, write: Write
) -> None:
    rollouts = write("teacher")
    scores = built.parts.teacher.score(rollouts, Sampled())
    for rollout, score in zip(rollouts, scores, strict=True):
        torch.testing.assert_close(rollout.sampling_logprobs, score.logprobs, **EXACT)
        assert (
            rollout.policy_logprobs.isnan().all()
            and rollout.loss_mask.all()
            and rollout.source == "teacher"
        )
        assert rollout.prompt_tokens == built.parts.renderer.render(rollout.prompt.messages)


def test_a_coin_decides_about_each_completion(built: RunComponents, write: Write) -> None:
    source, n = "mix(student=0.3, other=teacher)", 20
    mixed, student, teacher = write(source, n=n), write("student", n=n), write("teacher", n=n)
    for rollout, own, other in zip(mixed, student, teacher, strict=True):
        assert rollout.tokens.equal((own if rollout.source == "student" else other).tokens)
    share = sum(rollout.source == "student" for rollout in mixed) / len(mixed)
    assert abs(share - 0.3) < 3.3 * math.sqrt(0.3 * 0.7 / len(mixed))
    coins = [rollout.source for rollout in mixed]
    assert coins != [rollout.source for rollout in write(source, n=n, step=4)]
    assert coins != [rollout.source for rollout in write(source, n=n, seed=1)]
    assert coins == [rollout.source for rollout in write(source, n=n)]


@pytest.mark.parametrize("other", ["teacher", "dataset"])
def test_joined_completions_stand_beside_the_students_own(
    built: RunComponents, write: Write, other: str
) -> None:
    prompts = built.parts.prompts[:3]
    joined = write(f"join({other}, n=3)", prompts=prompts)
    assert [rollout.source for rollout in joined] == (["student"] * 2 + [other] * 3) * 3
    assert [rollout.sample for rollout in joined] == [*range(5)] * 3
    own = [rollout for rollout in joined if rollout.source == "student"]
    assert_equal(own, write("student", prompts=prompts))
    again = write(f"join({other}, n=3)", prompts=[prompts[0], prompts[0]])
    assert [rollout.sample for rollout in again] == [*range(10)]
    if other == "teacher":
        assert (
            len(
                {
                    rollout.tokens.tolist().__repr__()
                    for rollout in again
                    if rollout.source == "teacher"
                }
            )
            > 1
        )


def test_several_are_joined_in_the_order_in_which_they_are_named(
    built: RunComponents, write: Write
) -> None:
    prompts = built.parts.prompts[:3]
    joined = write("join(teacher+reference+dataset, 2)", prompts=prompts, n=1)
    names = ["student", *["teacher"] * 2, *["reference"] * 2, *["dataset"] * 2]
    assert [rollout.source for rollout in joined] == names * 3
    assert [rollout.sample for rollout in joined] == [*range(7)] * 3
    assert {rollout.prompt.id for rollout in joined[:7]} == {prompts[0].id}
    alone = write("join(dataset+reference, student=0)", prompts=prompts, n=4)
    assert [rollout.source for rollout in alone] == ["dataset", "reference"] * 3


def test_with_a_filter_the_others_answer_only_prompts_that_the_student_fails(
    built: RunComponents, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The untrained student is never right.
    reward = lambda task, rollout: float(rollout.tokens.sum() % 4 == 0)  # noqa: E731
    monkeypatch.setattr(type(built.parts.task), "reward", reward)
    prompts = [*built.parts.prompts[:24], built.parts.prompts[0]]
    everywhere = add_rewards(write("join(teacher, 2)", prompts=prompts, n=4), built.parts.task)
    groups = [everywhere[place : place + 6] for place in range(0, len(everywhere), 6)]
    expected = [
        rollout
        for group in groups
        for rollout in group
        if rollout.source == "student" or all(row.reward == 0 for row in group[:4])
    ]
    filtered = write("join(teacher, 2, filter=failed_group)", prompts=prompts, n=4)
    assert len(filtered) < len(everywhere) and {row.source for row in filtered} == {
        "student",
        "teacher",
    }
    assert_equal(add_rewards(filtered, built.parts.task), expected)


def test_the_reference_writes_what_the_student_once_would_have(
    built: RunComponents, write: Write
) -> None:
    """The frozen self is the student here, with another stream of random numbers."""
    written, own = write("reference", temperature=1e-3), write("student", temperature=1e-3)
    for rollout, mine in zip(written, own, strict=True):
        assert rollout.source == "reference" and rollout.loss_mask.all()
        assert rollout.tokens.equal(mine.tokens) and rollout.policy_logprobs.isnan().all()
    drawn = [rollout.text for rollout in write("reference", n=6)]
    assert drawn != [rollout.text for rollout in write("student", n=6)]
    assert drawn != [rollout.text for rollout in write("reference", n=6, seed=1)]


def test_an_imitated_prefix_is_the_same_text_with_a_loss_at_its_authors_tokens(
    write: Write,
) -> None:
    plain, imitated = write("prefix(2)", n=4), write("prefix(2, imitated=true)", n=4)
    for one, other in zip(plain, imitated, strict=True):
        assert one.tokens.equal(other.tokens) and other.loss_mask.all()
        assert other.mark_tokens_by("teacher").equal(~one.loss_mask)
        assert one.sampling_logprobs.equal(other.sampling_logprobs)


@pytest.mark.parametrize("origin", ["teacher", "dataset"])
def test_the_student_goes_on_after_a_prefix(
    built: RunComponents, write: Write, origin: str
) -> None:
    length = 2
    rollouts, theirs = write(f"prefix({length}, origin={origin})", n=6), write(origin, n=6)
    client = built.trainer.build_sampling_client()
    kinds = set()
    for rollout, other in zip(rollouts, theirs, strict=True):
        begun = other.tokens[:length]
        assert rollout.tokens[: len(begun)].equal(begun)
        assert rollout.loss_mask.tolist() == [False] * len(begun) + [True] * (
            len(rollout.tokens) - len(begun)
        )
        torch.testing.assert_close(
            rollout.sampling_logprobs[: len(begun)], other.sampling_logprobs[:length], **EXACT
        )
        assert rollout.policy_logprobs[: len(begun)].isnan().all()
        ended = begun[-1].item() in built.parts.renderer.stop_ids
        kinds.add(ended)
        assert (
            rollout.source == (origin if ended else "student") and ended != rollout.loss_mask.any()
        )
        assert len(rollout.tokens) <= LIMIT
        (score,) = client.score(
            [ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist()))], Sampled()
        )
        learned = rollout.loss_mask
        torch.testing.assert_close(
            rollout.policy_logprobs[learned], score.logprobs[learned], **EXACT
        )
        assert rollout.sampling_logprobs[learned].equal(rollout.policy_logprobs[learned])
        assert rollout.text == built.parts.renderer.decode(rollout.tokens.tolist())
    assert False in kinds


def test_a_prefix_that_ends_the_answer_leaves_nothing_to_learn_and_is_counted(write: Write) -> None:
    prompts = [asked("short", answer="a"), asked("long", answer="abcd")]
    rollouts = write("prefix(2, origin=dataset)", n=3, prompts=prompts)
    assert [bool(rollout.loss_mask.any()) for rollout in rollouts] == [False] * 3 + [True] * 3
    counts = [int(rollout.loss_mask.sum()) for rollout in rollouts]
    metrics = measure_rollouts(rollouts, counts, 3, StudentSource())
    assert (metrics["unsupervised_prompts"], metrics["from_student"], metrics["from_dataset"]) == (
        1.0,
        0.5,
        0.5,
    )


def test_mixed_tokens_are_drawn_from_the_mixture_of_both(
    built: RunComponents, write: Write
) -> None:
    share = 0.35
    rollouts = write(f"token_mix({share})")
    own = built.trainer.build_sampling_client().score(
        [
            ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist()))
            for rollout in rollouts
        ],
        Full(),
    )
    theirs = built.parts.teacher.score(rollouts, Full())
    for rollout, mine, other in zip(rollouts, own, theirs, strict=True):
        s, t = (signal.head.logprobs(signal.hidden).double() for signal in (mine, other))
        drawn = rollout.tokens[:, None]
        mixture = (share * t.exp() + (1 - share) * s.exp()).log().gather(1, drawn)[:, 0]
        torch.testing.assert_close(rollout.sampling_logprobs, mixture.float(), **EXACT)
        torch.testing.assert_close(
            rollout.policy_logprobs, s.gather(1, drawn)[:, 0].float(), **EXACT
        )
        assert rollout.source == "student" and rollout.loss_mask.all()


def test_the_teachers_whole_share_of_each_token_is_the_teachers_answer(
    built: RunComponents, write: Write
) -> None:
    for rollout in write("token_mix(1.0)"):
        voice = built.parts.teacher.bind_prompt(rollout.prompt)
        (sample,) = voice.client.sample(
            [request_of(rollout, voice)], SamplingParams(LIMIT, stop_ids=stops(built))
        )
        assert sample.tokens.equal(rollout.tokens)


def test_each_prompt_is_mixed_with_its_own_teacher(built: RunComponents, write: Write) -> None:
    student = built.trainer.build_sampling_client()
    rollouts = write("token_mix(0.5)", teacher=Choir(built, student))
    alone = write("token_mix(0.5)")
    plain = write("student")
    for number, rollout in enumerate(rollouts):
        even = int(rollout.prompt_tokens[1]) % 2 == 0
        assert rollout.tokens.equal((alone if even else plain)[number].tokens)
    assert {int(rollout.prompt_tokens[1]) % 2 for rollout in rollouts} == {0, 1}


@pytest.mark.parametrize(
    "source",
    ["teacher", "mix(student=0, other=teacher)", "join(teacher)", "token_mix", "prefix(2)"],
)
def test_a_teacher_that_writes_nothing_is_no_author(
    built: RunComponents, write: Write, source: str
) -> None:
    with pytest.raises(
        CapabilityError,
        match=r"lets the teacher write, but this teacher writes no answers; set source",
    ):
        write(source, teacher=Choir(built, None))


def test_a_teacher_that_cannot_be_read_token_by_token_is_named(
    built: RunComponents, write: Write
) -> None:
    with pytest.raises(
        CapabilityError,
        match=r"'token_mix'.*lockstep, which the teacher cannot.*mix\(other=teacher\)",
    ):
        write("token_mix", teacher=Choir(built, Remote()))


def test_replayed_rollouts_are_those_of_earlier_steps_only(write: Write) -> None:
    archive = RolloutArchive(deque(maxlen=20))
    fresh: list[Rollout] = []
    for step in range(1, 6):
        known = list(archive.newest)
        rollouts = write("mix(student=0.5, other=replay)", step=step, archive=archive)
        old = [rollout for rollout in rollouts if rollout.policy_version < step - 1]
        assert bool(old) == (step > 1)
        for rollout in old:
            (origin,) = [each for each in known if each.tokens is rollout.tokens]
            assert_equal([replace(rollout, sample=origin.sample)], [origin])
        fresh += [rollout for rollout in rollouts if rollout.policy_version == step - 1]
        assert [id(rollout.tokens) for rollout in archive.newest] == [
            id(rollout.tokens) for rollout in fresh[-20:]
        ]
        assert all(rollout.states is None for rollout in archive.newest)
        names = [(rollout.prompt.id, rollout.sample) for rollout in rollouts]
        assert len(set(names)) == len(names) == 14
        assert all(rollout.source == "student" for rollout in rollouts)
        metrics = measure_rollouts(rollouts, [1] * len(rollouts), step, StudentSource())
        assert metrics["from_student"] == 1.0
        assert (
            metrics["staleness"]
            == sum(step - 1 - rollout.policy_version for rollout in rollouts) / 14
        )


def test_a_part_of_the_students_share_is_replayed_from_a_full_buffer(
    write: Write, built: RunComponents
) -> None:
    source, prompts = "mix(student=0.6, other=dataset, replay=0.5)", built.parts.prompts[:40]
    archive = RolloutArchive(deque(maxlen=60))
    plain = write("mix(student=0.6, other=dataset)", prompts=prompts, n=10, step=3)
    # The buffer is not full before, so the first step is as without it.
    assert_equal(write(source, prompts=prompts, n=10, step=3, archive=archive), plain)
    assert len(archive.newest) == 60
    counts = Counter(
        "replay" if rollout.policy_version == 2 else rollout.source
        for rollout in write(source, prompts=prompts, n=10, step=4, archive=archive)
    )
    for name, share in (("student", 0.3), ("replay", 0.3), ("dataset", 0.4)):
        tolerance = 4 * math.sqrt(share * (1 - share) / 400)
        assert counts[name] / 400 == pytest.approx(share, abs=tolerance)


def test_nothing_is_remembered_unless_it_is_replayed(write: Write) -> None:
    archive = RolloutArchive()
    write("student", archive=archive)
    assert not archive.newest


MISTAKES = {
    "studnet": r"rollout\.source: no source named 'studnet'; did you mean 'student'",
    "mix(0.5, teecher)": r"rollout\.source\.other: .*'teacher'.*\(given: 'teecher'\)",
    "mix(lambda=0.5)": r"source 'mix' has no parameter 'lambda'; known: other, replay, student",
    "mix(1.5)": r"rollout\.source\.student: .*less than or equal to 1 \(given: 1\.5\)",
    "join(replay)": r"rollout\.source\.other: .*'dataset', 'teacher' or 'reference'",
    "join(teacher, student=0, filter=failed_group)": r"reads the student's answers",
    "join(teacher+teacher)": r"source\.other: .*or several joined by \+, each once",
    "join(teacher, student=-1)": r"source\.student: .*greater than or equal to 0",
    "reference": r"needs a reference, and the recipe has none; set reference: \{type: self",
    "token_mix(-0.1)": r"source\.teacher: .*greater than or equal to 0",
    "student(1)": r"source 'student' takes no arguments, but 1 values were given",
    "cache": r"rollout\.source: give either path, a rollouts\.jsonl, or run, an earlier stage",
    "prefix(5)": r"rollout: a prefix of 5 tokens leaves no tokens to the student, because max_new_tokens is 5",
}


@pytest.mark.parametrize("source", MISTAKES)
def test_a_source_that_cannot_be_is_refused_with_what_to_write(source: str) -> None:
    with pytest.raises(RecipeError, match=MISTAKES[source]):
        recipe_with(source)


def test_a_path_that_could_not_be_read_back_is_refused() -> None:
    with pytest.raises(RecipeError, match="has a comma, or a space or quote at its end"):
        recipe_with({"type": "cache", "path": "a,b.jsonl"})


@pytest.mark.parametrize("source", WRITTEN)
def test_a_source_reads_back_from_its_own_text(source: str) -> None:
    recipe = recipe_with(source, {"reference": {"type": "self", "weights": "frozen"}})
    assert recipe.rollout.source.model_dump() == source
    assert parse_recipe(resolve_recipe(recipe), "again").rollout == recipe.rollout


def test_a_number_of_a_source_may_be_a_schedule() -> None:
    recipe = recipe_with("mix(student=linear(0, 1), other=teacher)", {"train.steps": 5})
    courses = ScheduleState(recipe.schedules, 5)
    sources = [
        recipe.replace_numbers(courses.compute_numbers(step)).rollout.source for step in range(1, 6)
    ]
    assert [source.student for source in sources] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {source.other for source in sources} == {"teacher"}


@pytest.mark.long
def test_a_prefix_may_get_shorter(models: Path, tmp_path: Path) -> None:
    folder = toy_run(
        models, tmp_path, {"rollout.source": "prefix(length=linear(3, 0), origin=teacher)"}
    ).folder
    recorded = rows(folder / "rollouts.jsonl")
    longest = [
        max(row["loss_mask"].count(False) for row in recorded if row["step"] == step)
        for step in range(1, 5)
    ]
    assert longest == [3, 2, 1, 0]


SILENT = {
    "scripted": {
        "teacher": {"type": "scripted", "tape": "tape.jsonl"},
        "objective": {"signal": "sampled"},
    },
    "none": {"teacher": "none", "objective": {"signal": "text", "divergence": "ce"}},
}


@pytest.mark.parametrize("teacher", SILENT)
@pytest.mark.parametrize(
    "source", ["teacher", "token_mix", "mix(other=teacher)", "join(teacher)", "prefix(2)"]
)
def test_a_source_that_needs_a_writing_teacher_is_refused_without_one(
    source: str, teacher: str
) -> None:
    text = rf"rollout\.source: .* lets the teacher write, but teacher '{teacher}' writes no answers; set source: student, "
    with pytest.raises(CapabilityError, match=text):
        recipe_with(source, SILENT[teacher])


@pytest.mark.parametrize("teacher", SILENT)
@pytest.mark.parametrize("source", ["dataset", "mix(other=replay)", "prefix(2, origin=dataset)"])
def test_other_sources_need_no_writing_teacher(source: str, teacher: str) -> None:
    recipe_with(source, SILENT[teacher])


def test_the_sources_are_listed_with_a_line_each() -> None:
    listed = list_names("sources")
    assert [row["name"] for row in listed] == list_plugins(SOURCES)
    assert all(row["summary"].endswith(".") for row in listed)


RUNS = [
    "dataset",
    "teacher",
    "mix(student=0.5, other=dataset)",
    "join(other=teacher, n=1)",
    "token_mix(teacher=0.2)",
    "prefix(length=2, origin=teacher)",
]


@pytest.mark.long
@pytest.mark.parametrize("source", RUNS)
def test_a_run_learns_from_every_source_and_says_who_wrote(
    models: Path, tmp_path: Path, source: str
) -> None:
    folder = toy_run(models, tmp_path, {"rollout.source": source, "rollout.n": 2}).folder
    shares = [
        sum(curve(folder, f"from_{who}")[step] for who in ("student", "teacher", "dataset"))
        for step in range(4)
    ]
    assert shares == pytest.approx([1.0] * 4)
    assert curve(folder, "staleness") == [0.0] * 4
    recorded = rows(folder / "rollouts.jsonl")
    for row in recorded:
        known = [value is not None for value in row["policy_logprobs"]]
        assert known == ([row["source"] == "student" and learned for learned in row["loss_mask"]])
        assert all(
            (value is None) != learned
            for value, learned in zip(row["divergence"], row["loss_mask"], strict=True)
        )
    assert sum(map(sum, (row["loss_mask"] for row in recorded))) == sum(curve(folder, "tokens"))
    assert all(value is not None and value > 0 for value in curve(folder, "grad_norm"))


@pytest.mark.long
@pytest.mark.parametrize("source", ["teacher", "token_mix(0.5)", "prefix(2)", "mix(other=teacher)"])
def test_a_student_that_sees_more_writes_for_itself(
    models: Path, tmp_path: Path, source: str
) -> None:
    """Check context distillation (2209.15189): the teacher writes after its own prompt, the student learns after the plain one."""
    shown = {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "ema", "rate": 0.3},
        "reference": "{answer}",
    }
    folder = toy_run(models, tmp_path, {"rollout.source": source, "teacher": shown}).folder
    for row in rows(folder / "rollouts.jsonl"):
        assert len(row["prompt_tokens"]) == len(row["prompt"]) + 2
    assert all(value > 0 for value in curve(folder, "grad_norm"))


def recipe_with(source: Any, changes: Mapping[str, Any] | None = None) -> Recipe:
    return parse_recipe(
        toy_data(Path("models"), {"rollout.source": source, **(changes or {})}), "r.yaml"
    )


def asked(name: str, **fields: Any) -> Prompt:
    return Prompt(name, (Message("user", "ab"),), **fields)


def stops(built: RunComponents) -> frozenset[int]:
    return built.parts.renderer.stop_ids


def request_of(rollout: Rollout, voice: PromptedClient) -> SampleRequest:
    return SampleRequest(
        voice.prompt_tokens, seed_of(0, "rollout", 3, rollout.prompt.id, rollout.sample)
    )


class Remote(SamplingClient):
    """A client that samples and scores, without access token by token."""

    capabilities = Capabilities(frozenset())

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        return []

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        return []


class Choir(ClientTeacher):
    """A teacher with two models, by the first letter of the prompt; without a second one it writes nothing."""

    def __init__(self, built: RunComponents, second: SamplingClient | None) -> None:
        voice = built.parts.teacher.bind_prompt(built.parts.prompts[0])
        assert voice is not None
        super().__init__(voice.client, built.parts.renderer)
        self.second = second

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        return None

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        voice = super().bind_prompt(prompt)
        if self.second is None:
            return None
        return (
            voice
            if voice.prompt_tokens[1] % 2 == 0
            else PromptedClient(self.second, voice.prompt_tokens)
        )
