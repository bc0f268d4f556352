"""Requirements for every backend, tested for each folder found among the backends."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import toy_recipe

from practicum.core.plugins import list_plugins, load_plugin
from practicum.errors import CapabilityError
from practicum.objective import Full, Objective, Sampled, Term, TopK
from practicum.ports import (
    AdamParams,
    Backend,
    SamplingClient,
    SelfTeacher,
    TrainingClient,
    WeightUpdateRule,
)
from practicum.rollouts import RolloutBatch, sample_rollouts
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.training.loop import assemble as paired
from practicum.types import Datum, SampleRequest, SamplingParams, ScoreRequest

Build = Callable[[], RunComponents]
OBJECTIVE = Objective(losses=(Term(signal=TopK(k=4)),))
"""An objective that every backend can train."""

BACKENDS = {
    "local": {},
    "tinker": {
        "student.model": "student",
        "student.lora": {"rank": 4},
        "objective": OBJECTIVE.model_dump(),
        "backend": {"type": "tinker"},
    },
    "ray": {"backend": {"type": "ray", "trainers": 2}},
    "torchrun": {"backend": {"type": "torchrun"}},
    "backends.child": {"backend": {"type": "backends.child"}},
}
"""The recipe changes that each backend needs; a name with dots belongs to the tests."""
MARKS: dict[str, Any] = {
    "local": (),
    "ray": pytest.mark.slow,
    "backends.child": pytest.mark.slow,
}
"""These backends start processes for each test; tests/backends/test_ray.py and test_child.py cover a few of the tests."""
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # see tests/service.py


def test_every_backend_on_disk_is_under_contract() -> None:
    texts = sorted(name for name in BACKENDS if "." not in name)
    assert texts == ["local", "ray", "tinker", "torchrun"]
    # A flow has no texts: see tests/methods/pi_flow.
    assert sorted([*texts, "flow"]) == list_plugins("backends")


@pytest.fixture(scope="module")
def url(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return a service that has the models."""
    from service import serving

    with serving(models, tmp_path_factory.mktemp("served")) as served:
        yield served.url


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the only one of a run by torchrun."""
    from backends.torchrun_forks import join_alone

    with join_alone(monkeypatch):
        yield


@pytest.fixture(
    params=[pytest.param(name, marks=MARKS.get(name, pytest.mark.long)) for name in BACKENDS]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Return a backend's name, as a recipe has it."""
    return request.param


@pytest.fixture
def build(
    backend: str, request: pytest.FixtureRequest, models: Path, tmp_path: Path
) -> Iterator[Build]:
    """Return a function that builds the same student and teacher at each call."""
    changes = dict(BACKENDS[backend])
    if backend == "torchrun":
        request.getfixturevalue("alone")
    if backend == "tinker":
        changes["backend"] = {"type": "tinker", "url": request.getfixturevalue("url")}
    made: list[RunComponents] = []

    def built() -> RunComponents:
        made.append(assemble_run(toy_recipe(models, changes), tmp_path))
        return made[-1]

    yield built
    for one in made:
        one.close()


def requests(built: RunComponents, count: int = 5) -> list[SampleRequest]:
    prompts = built.parts.prompts[:count]
    return [
        SampleRequest(built.parts.renderer.render(prompt.messages), seed)
        for seed, prompt in enumerate(prompts)
    ]


def data(built: RunComponents) -> list[Datum]:
    client = built.backend.build_sampler(built.student)
    batch = RolloutBatch(built.parts.prompts[:5], 1, 0, 1)
    rollouts = sample_rollouts(batch, client, built.parts.renderer, built.settings.plan(1).sampling)
    return paired(rollouts, built.parts.teacher.score(rollouts, Full()))


def test_it_speaks_the_protocols(build: Build) -> None:
    built = build()
    assert isinstance(built.backend, Backend)
    assert isinstance(built.trainer, TrainingClient)
    assert isinstance(built.backend.build_sampler(built.student), SamplingClient)
    assert isinstance(built.trainer.snapshot(), SamplingClient)
    assert isinstance(
        built.backend.build_self_teacher(built.student, WeightUpdateRule("frozen"), "teacher"),
        SelfTeacher,
    )


def test_a_completion_depends_on_its_seed_and_on_nothing_beside_it(build: Build) -> None:
    built = build()
    client, params = built.backend.build_sampler(built.student), built.settings.plan(1).sampling
    together = client.sample(requests(built), params)
    alone = [client.sample([request], params)[0] for request in requests(built)]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens.equal(other.tokens)
        torch.testing.assert_close(
            one.sampling_logprobs, other.sampling_logprobs, rtol=1e-5, atol=1e-5
        )


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(build: Build) -> None:
    built = build()
    params = built.settings.plan(1).sampling
    for sample in built.backend.build_sampler(built.student).sample(requests(built, 40), params):
        ended = sample.tokens[-1].item() in params.stop_ids
        assert ended == (sample.stop_reason == "stop")
        assert ended or len(sample.tokens) == params.max_new_tokens
        assert not any(token in params.stop_ids for token in sample.tokens[:-1].tolist())


def test_stop_texts_end_an_answer_or_are_refused(backend: str, build: Build) -> None:
    built = build()
    client, decode = built.backend.build_sampler(built.student), built.parts.renderer.decode
    free = SamplingParams(8)
    answers = [sample.tokens.tolist() for sample in client.sample(requests(built), free)]
    text = decode(answers[0][2:4])
    params = replace(free, stop_texts=(text, "nowhere to be found"))
    if backend == "tinker":
        with pytest.raises(
            CapabilityError,
            match=r"^stop_texts .* ends an answer only at stop tokens; set stop_ids$",
        ):
            client.sample(requests(built), params)
        return
    for sample, tokens in zip(client.sample(requests(built), params), answers, strict=True):
        ends = [count for count in range(1, 9) if text in decode(tokens[:count])]
        assert sample.tokens.tolist() == tokens[: min(ends, default=8)]
        assert sample.stop_reason == ("stop" if ends else "length")


def test_a_snapshot_goes_on_with_the_weights_of_its_time(build: Build, backend: str) -> None:
    """Bit for bit; a service batches requests that arrive at about the same time, and its products round by the batch size."""
    built, rounding = build(), 1e-6 if backend == "tinker" else 0.0
    asked, params = requests(built), built.settings.plan(1).sampling
    live = built.backend.build_sampler(built.student)
    before, then = live.sample(asked, params), built.trainer.snapshot()
    step(built)
    later = built.trainer.snapshot()
    step(built)
    for one, other in zip(before, then.sample(asked, params), strict=True):
        assert one.tokens.equal(other.tokens)
        torch.testing.assert_close(
            one.policy_logprobs, other.policy_logprobs, rtol=0, atol=rounding
        )
    seen = [client.sample(asked, params)[0].policy_logprobs for client in (then, later, live)]
    assert not seen[0].equal(seen[1]) and not seen[1].equal(seen[2])


def test_scores_of_own_samples_are_what_the_sampler_said(build: Build) -> None:
    built = build()
    client = built.backend.build_sampler(built.student)
    asked = requests(built)
    samples = client.sample(asked, built.settings.plan(1).sampling)
    pairs = zip(asked, samples, strict=True)
    scores = client.score(
        [ScoreRequest(ask.prompt_tokens, tuple(got.tokens.tolist())) for ask, got in pairs],
        Sampled(),
    )
    for sample, score in zip(samples, scores, strict=True):
        assert score.logprobs is not None
        torch.testing.assert_close(score.logprobs, sample.policy_logprobs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            sample.sampling_logprobs, sample.policy_logprobs, rtol=1e-5, atol=1e-6
        )


def test_greedy_answers_do_not_depend_on_the_seed(build: Build) -> None:
    built = build()
    params = SamplingParams(4, temperature=0.0, stop_ids=built.settings.plan(1).sampling.stop_ids)
    asked = requests(built)
    client = built.backend.build_sampler(built.student)
    again = [SampleRequest(request.prompt_tokens, request.seed + 100) for request in asked]
    for one, other in zip(client.sample(asked, params), client.sample(again, params), strict=True):
        assert one.tokens.equal(other.tokens)


def test_a_gradient_moves_the_weights_and_is_then_forgotten(build: Build) -> None:
    built = build()
    before = snapshot(built)
    built.trainer.forward_backward(data(built), OBJECTIVE, seed=0)
    assert same(before, snapshot(built)), "a gradient without a step moves nothing"
    assert built.trainer.optim_step(AdamParams(0.01))["skipped"] == 0.0
    after = snapshot(built)
    assert not same(before, after)
    built.trainer.optim_step(AdamParams(0.01))
    assert same(after, snapshot(built)), "a step without a new gradient moves nothing"


def test_an_update_from_nothing_moves_nothing(build: Build) -> None:
    built = build()
    step(built)  # so that there is momentum
    before, wrong = (
        snapshot(built),
        [replace(d, rollout=replace(d.rollout, reward=0.0)) for d in data(built)],
    )
    (term,) = OBJECTIVE.losses
    filtered = Objective(losses=(term.model_copy(update={"filter": "correct"}),))
    result = built.trainer.forward_backward(wrong, filtered, seed=1)
    assert result.supervised == [0] * len(wrong)
    assert built.trainer.optim_step(AdamParams(0.01, weight_decay=0.1))["empty_updates"] == 1.0
    assert same(before, snapshot(built))


def test_the_same_data_give_the_same_result(build: Build) -> None:
    one, other = build(), build()
    batch = data(
        one
    )  # sampled once: the batches of a service depend on its timing, and change the last digits
    first = one.trainer.forward_backward(batch, OBJECTIVE, seed=3)
    second = other.trainer.forward_backward(batch, OBJECTIVE, seed=3)
    assert first.metrics == second.metrics
    one.trainer.optim_step(AdamParams(0.01))
    other.trainer.optim_step(AdamParams(0.01))
    assert same(snapshot(one), snapshot(other))


def test_there_is_one_record_a_datum_and_one_number_a_token(build: Build) -> None:
    built = build()
    batch = data(built)
    result = built.trainer.forward_backward(batch, OBJECTIVE, seed=0)
    for datum, output in zip(
        batch, result.outputs.split([datum.rollout for datum in batch]), strict=True
    ):
        assert len(output.logprobs) == len(output.divergence) == len(datum.rollout.tokens)
        assert torch.isfinite(output.divergence).all() and (output.divergence >= -1e-6).all()


def test_what_is_saved_and_loaded_goes_on_the_same(build: Build, tmp_path: Path) -> None:
    whole, resumed = build(), build()
    step(whole)
    folder = tmp_path / "state"
    folder.mkdir()
    whole.backend.save(whole.student, folder)
    assert list(folder.glob("student*.safetensors"))
    resumed.backend.load(resumed.student, folder)
    step(whole)
    step(resumed)
    assert same(snapshot(whole), snapshot(resumed))


def test_a_copy_of_the_state_is_written_as_it_was_while_the_student_learns_on(
    backend: str, build: Build, tmp_path: Path
) -> None:
    built = build()
    step(built)
    saved, copied = tmp_path / "saved", tmp_path / "copied"
    saved.mkdir()
    copied.mkdir()
    built.backend.save(built.student, saved)
    write = built.backend.copy_state(built.student)
    step(built)
    write(copied)
    names = sorted(path.name for path in saved.iterdir())
    assert names == sorted(path.name for path in copied.iterdir())
    if load_plugin("backends", backend).Config.checkpoints_here:
        for name in names:
            assert (copied / name).read_bytes() == (saved / name).read_bytes(), name


def test_a_checkpoint_takes_no_more_than_was_announced(
    backend: str, build: Build, tmp_path: Path
) -> None:
    if not load_plugin("backends", backend).Config.checkpoints_here:
        pytest.skip("its checkpoints only hold an address")
    built = build()
    step(built)
    built.backend.save(built.student, tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    tensors = sum(tensor.nbytes for path in files for tensor in load_file(path).values())
    assert 0 < tensors <= sum(path.stat().st_size for path in files) <= built.student.state_bytes


@pytest.mark.parametrize(
    "rule",
    [
        WeightUpdateRule("live"),
        WeightUpdateRule("frozen"),
        WeightUpdateRule("ema", 0.5),
        WeightUpdateRule("periodic", period=2),
    ],
)
def test_the_self_teacher_follows_its_rule(build: Build, rule: WeightUpdateRule) -> None:
    built = build()
    if built.student.dims is None and rule.weights in ("ema", "periodic"):
        with pytest.raises(CapabilityError, match="set weights: frozen or live"):
            built.backend.build_self_teacher(built.student, rule, "teacher")
        return
    teacher = built.backend.build_self_teacher(built.student, rule, "teacher")
    asked = [ScoreRequest((8, 4), (7, 8, 2))]

    def score() -> torch.Tensor:
        logprobs = teacher.score(asked, Sampled())[0].logprobs
        assert logprobs is not None
        return logprobs

    start = score()
    step(built)
    teacher.after_step(1, ())
    moved_first = not score().equal(start)
    step(built)
    teacher.after_step(2, ())
    moved_second = not score().equal(start)
    expected = {
        "live": (True, True),
        "frozen": (False, False),
        "ema": (True, True),
        "periodic": (False, True),
    }
    assert (moved_first, moved_second) == expected[rule.weights]


def test_a_topk_answer_holds_k_candidates_or_richer(build: Build) -> None:
    built = build()
    (answer,) = built.backend.build_sampler(built.student).score(
        [ScoreRequest((8, 4), (7, 8, 2))], TopK(k=3, support="teacher")
    )
    assert answer.head is not None or (
        answer.topk_ids is not None and answer.topk_ids.shape == (3, 3)
    )


def step(built: RunComponents) -> None:
    built.trainer.forward_backward(data(built), OBJECTIVE, seed=0)
    built.trainer.optim_step(AdamParams(0.01))


def snapshot(built: RunComponents) -> dict[str, torch.Tensor]:
    """Return the model's log-probabilities of a text, wherever its weights are."""
    (said,) = built.backend.build_sampler(built.student).score(
        [ScoreRequest((8, 4, 3), (7, 8, 2, 5))], Sampled()
    )
    assert said.logprobs is not None
    return {"logprobs": said.logprobs.clone()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(value.equal(other[name]) for name, value in one.items())
