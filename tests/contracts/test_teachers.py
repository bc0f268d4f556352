"""Requirements for every teacher, tested for each file in the folder of teachers."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_server import FolderModel, Stub
from teacher_services import Functions
from toy import TASK, make_model

from practicum.backends.local.loading import LoadedModel, load, load_student
from practicum.backends.local.residency import build_scorer
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.core.plugins import list_plugins, load_plugin
from practicum.models.config import ModelConfig, StudentConfig
from practicum.objective import Full, Objective, Sampled, Signal, TopK
from practicum.ports import AdamParams, Model, TaskContext, Teacher, TeacherContext, TeacherRequest
from practicum.rows import PromptSet
from practicum.tasks.reverse import Config as Reverse
from practicum.tasks.reverse import build as reverse
from practicum.text.tokenizers import load_renderer
from practicum.training.candidates import compute_candidates
from practicum.types import (
    Datum,
    Prompt,
    Rollout,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # see tests/service.py
SELF = {"type": "self", "weights": "ema", "rate": 0.5}
FROZEN = {"type": "self", "weights": "frozen"}

# One set of settings or more for each file; a teacher without an entry here fails the first test. MODEL, OTHER, TAPE and FOLDER
# stand for a model folder, one with another tokenizer, a tape and a folder to write to, the names of DIALECTS for a server that
# has the same model, SERVICE for one that speaks the Tinker API.
DIALECTS = {"VLLM": "vllm", "SGLANG": "sglang", "ECHO": "echo", "CHAT": "chat"}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "cached": [
        {"teacher": {"type": "model", "model": "MODEL"}, "folder": "FOLDER"},
        {"teacher": {"type": "model", "model": "MODEL", "residency": "disk"}},
        {
            "teacher": {
                "type": "privileged",
                "system": "ab",
                "teacher": {"type": "model", "model": "MODEL"},
            }
        },
        {"teacher": {"type": "openai_api", "url": "VLLM"}, "folder": "FOLDER"},
        {"teacher": {"type": "tinker", "url": "SERVICE", "model": "teacher"}, "folder": "FOLDER"},
    ],
    "chat_api": [
        {"url": "CHAT", "model": "m"},
        {"url": "CHAT", "model": "m", "folder": "FOLDER", "reuse": False},
    ],
    "expert": [{}, {"softness": 0.5}],
    "model": [
        {"model": "MODEL", "residency": residency} for residency in ("resident", "swap", "disk")
    ],
    "none": [{}],
    "openai_api": [
        {"url": "VLLM"},
        {"url": "SGLANG", "dialect": "sglang", "tokenizer": "MODEL"},
        {"url": "ECHO", "dialect": "echo", "concurrency": 1},
        {"url": "CHAT", "dialect": "chat"},
    ],
    "pool": [
        {"kind": "geometric", "teachers": {"a": SELF, "b": {"type": "model", "model": "MODEL"}}},
        {
            "kind": "arithmetic",
            "teachers": {"a": SELF, "b": FROZEN},
            "weights": {"a": 3, "b": 1},
            "gate": 1.0,
        },
        {"kind": "sum", "teachers": {"a": FROZEN, "b": {"type": "scripted", "tape": "TAPE"}}},
    ],
    "privileged": [
        {"reference": "{answer}", "teacher": SELF},
        {"system": "ab", "teacher": FROZEN},
        {"question": "{attempt} {outcome}", "teacher": FROZEN},
    ],
    "route": [
        {"key": "outcome", "teachers": {"correct": SELF, "incorrect": FROZEN}},
        {"key": "domain", "teachers": {"a": SELF, "b": {"type": "model", "model": "MODEL"}}},
        {
            "key": "teacher",
            "teachers": {"a": {"type": "scripted", "tape": "TAPE"}, "other": SELF},
            "default": "a",
        },
    ],
    "scripted": [{"tape": "TAPE"}],
    "tinker": [
        {"url": "SERVICE", "model": "teacher"},
        {"url": "SERVICE", "model": "teacher", "tokenizer": "MODEL"},
    ],
    "text_only": [
        {"teacher": {"type": "model", "model": "MODEL"}},
        {"teacher": SELF},
    ],
    "translated": [
        {"teacher": {"type": "model", "model": "OTHER"}},
        {"teacher": {"type": "model", "model": "MODEL"}},
        {"teacher": {"type": "cached", "teacher": {"type": "model", "model": "OTHER"}}},
        {"teacher": {"type": "openai_api", "url": "VLLM"}},
    ],
    "self": [
        {"weights": weights, "rate": 0.5, "period": 2}
        for weights in ("live", "frozen", "ema", "periodic")
    ],
}
CASES = [
    (name, settings) for name in list_plugins("teachers") for settings in SETTINGS.get(name, [])
]
SIGNALS: list[Signal] = [
    Sampled(),
    TopK(k=3, support="student"),
    TopK(k=3, support="teacher"),
    Full(),
]
COUNT = 5
ROUNDS = {"service": False}
"""True if the current teacher is behind a service, where batches formed as requests arrive change the last digits."""


class Knowing(PromptSet):
    """A task with an expert that is not certain."""

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> dict[str, float]:
        assert prompt.answer is not None
        return {prompt.answer: 0.75, prompt.answer[:1]: 0.25}


@dataclass(frozen=True)
class Built:
    """A student, and the teacher under contract."""

    trainer: LocalTrainer
    teacher: Teacher

    def learn(self, data: list[Datum]) -> None:
        """Do one step of the student and inform the teacher."""
        self.trainer.forward_backward(data, Objective(), seed=0)
        self.trainer.optim_step(AdamParams(learning_rate=0.01))
        self.teacher.after_step(1, ())


@pytest.fixture(scope="module")
def params(models: Path) -> SamplingParams:
    return SamplingParams(
        5, stop_ids=load(ModelConfig(model=str(models / "student"))).renderer.stop_ids
    )


@pytest.fixture(scope="module")
def rollouts(models: Path, params: SamplingParams) -> list[Rollout]:
    """Return rollouts of the student, right and wrong, in two domains."""
    loaded = load(ModelConfig(model=str(models / "student")))
    task = reverse(Reverse(**TASK), TaskContext(seed=0, base_dir=models))
    prompts = [
        Prompt(
            prompt.id,
            prompt.messages,
            prompt.answer,
            domain="ab"[number % 2],
            teacher="a" if number % 3 else None,
        )
        for number, prompt in enumerate(task.train_prompts()[:COUNT])
    ]
    prompt_tokens = [loaded.renderer.render(prompt.messages) for prompt in prompts]
    samples = LocalSampler(loaded.language_model).sample(
        [SampleRequest(tokens, seed) for seed, tokens in enumerate(prompt_tokens)], params
    )
    named = LocalSampler(loaded.language_model)
    written = [
        Rollout(
            prompt=prompt,
            prompt_tokens=tokens,
            tokens=sample.tokens,
            loss_mask=torch.ones_like(sample.tokens, dtype=torch.bool),
            sampling_logprobs=sample.sampling_logprobs,
            policy_logprobs=sample.policy_logprobs,
            policy_version=0,
            stop_reason=sample.stop_reason,
            text=loaded.renderer.decode(sample.tokens.tolist()),
            reward=float(number % 2),
        )
        for number, (prompt, tokens, sample) in enumerate(
            zip(prompts, prompt_tokens, samples, strict=True)
        )
    ]
    candidates = compute_candidates(named, written, 3)
    return [
        replace(rollout, candidates=ids) for rollout, ids in zip(written, candidates, strict=True)
    ]


@pytest.fixture(scope="module")
def data(models: Path, rollouts: list[Rollout]) -> list[Datum]:
    """Return data that the student can learn from, for any teacher."""
    client = LocalSampler(load(ModelConfig(model=str(models / "teacher"))).language_model)
    requests = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    return [Datum(*pair) for pair in zip(rollouts, client.score(requests, Full()), strict=True)]


@pytest.fixture(scope="module")
def tape(rollouts: list[Rollout], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tape") / "rollouts.jsonl"
    rows = [
        {
            "prompt": rollout.prompt.id,
            "tokens": rollout.tokens.tolist(),
            "teacher_logprobs": [-1.5] * len(rollout.tokens),
        }
        for rollout in rollouts
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def places(models: Path, tape: Path) -> Iterator[dict[str, str]]:
    """Return the values of the placeholders in the settings."""
    model = FolderModel(models / "teacher")
    stubs = {word: Stub(model, dialect, names=True) for word, dialect in DIALECTS.items()}
    from service import serving

    with ExitStack() as stack:
        served = stack.enter_context(serving(models, tape.parent / "served"))
        for stub in stubs.values():
            stack.enter_context(stub)
        other = make_model(tape.parent / "other", tokenizer="pairs")
        files = {
            "MODEL": models / "teacher",
            "OTHER": other,
            "TAPE": tape,
            "FOLDER": tape.parent / "scores",
        }
        yield {word: str(file) for word, file in files.items()} | {
            "SERVICE": served.url,
            **{word: stub.url for word, stub in stubs.items()},
        }


def _insert_placeholder(case: tuple[str, dict[str, Any]]) -> Any:
    """Mark as long each case that asks a server, and each but the first of a teacher."""
    name, settings = case
    asks = any(f"'{place}'" in str(case) for place in (*DIALECTS, "SERVICE"))
    return pytest.param(
        case, marks=pytest.mark.long if asks or settings is not SETTINGS[name][0] else ()
    )


@pytest.fixture(scope="module")
def untrained(models: Path) -> LoadedModel:
    """Load the student before its first step; each test trains a copy, which takes a twentieth of the time of loading it."""
    return load_student(StudentConfig(model=str(models / "student")), seed=0)


@pytest.fixture(
    params=map(_insert_placeholder, CASES),
    ids=lambda case: "-".join([case[0], *map(str, list(case[1].values())[:1])])[:40],
)
def assemble(
    request: pytest.FixtureRequest, models: Path, places: dict[str, str], untrained: LoadedModel
) -> Callable[[], Built]:
    """Return a function that builds the same student and teacher at each call."""
    name, settings = request.param
    config = parsed(name, settings, places)
    ROUNDS["service"] = "SERVICE" in str(settings)

    def load_model(inner: Any) -> Model:
        loaded = load(inner)
        return Model(
            build_scorer(loaded, inner, 3, 4), loaded.renderer, loaded.context_length, loaded.source
        )

    def built() -> Built:
        student = deepcopy(untrained)
        trainer = LocalTrainer(student.language_model)
        drawn = reverse(Reverse(**TASK), TaskContext(seed=0, base_dir=models))
        task = Knowing(drawn.train_prompts(), drawn.heldout_prompts())
        context = TeacherContext(
            student.renderer,
            Functions(trainer.build_self_teacher, load_model, load_renderer),
            task=task,
        )
        return Built(trainer, context.build(config))

    return built


def parsed(name: str, settings: dict[str, Any], places: dict[str, str]) -> Any:
    """Return the settings as the plug-in reads them, with paths and addresses filled in."""
    text = json.dumps({"type": name, **settings})
    for word, place in places.items():
        text = text.replace(f'"{word}"', json.dumps(place))
    return load_plugin("teachers", name).Config.model_validate(json.loads(text))


def can(teacher: Teacher, signal: Signal) -> bool:
    return signal.name in teacher.capabilities.signals and (
        not isinstance(signal, TopK) or signal.support in teacher.capabilities.supports
    )


def spoken(signal: TeacherSignal) -> list[TeacherSignal]:
    """Return the answer, or the answers of a pool's members."""
    return (
        [signal]
        if signal.pool is None
        else [one for member in signal.pool.members for one in spoken(member)]
    )


def tensors(signal: TeacherSignal) -> dict[str, torch.Tensor]:
    """Return every tensor of an answer, by name."""
    fields = ("logprobs", "topk_ids", "topk_logprobs", "hidden")
    return {
        f"{one.name} {name}": value
        for one in spoken(signal)
        for name in fields
        if (value := getattr(one, name)) is not None
    }


def assert_same(one: list[TeacherSignal], other: list[TeacherSignal]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert tensors(mine).keys() == tensors(theirs).keys()
        for name, value in tensors(mine).items():
            if ROUNDS["service"]:
                torch.testing.assert_close(value, tensors(theirs)[name], rtol=1e-5, atol=1e-5)
            else:
                assert value.equal(tensors(theirs)[name])


def test_every_teacher_on_disk_is_under_contract() -> None:
    # `velocity` scores trajectories: see tests/methods/pi_flow.
    assert sorted([*SETTINGS, "velocity"]) == list_plugins("teachers")


def test_it_is_a_teacher_and_its_settings_promise_what_it_can_give(
    assemble: Callable[[], Built], request: pytest.FixtureRequest, places: dict[str, str]
) -> None:
    teacher = assemble().teacher
    name, settings = request.node.callspec.params["assemble"]
    assert isinstance(teacher, Teacher)
    assert teacher.capabilities == parsed(name, settings, places).capabilities()
    assert teacher.capabilities.signals <= {"sampled", "topk", "full"}


def test_its_settings_read_back_from_what_a_run_folder_keeps_of_them(
    places: dict[str, str],
) -> None:
    for name, settings in CASES:
        config = parsed(name, settings, places)
        assert type(config).model_validate(json.loads(config.model_dump_json())) == config


def test_each_signal_it_can_give_is_aligned_with_the_rollouts(
    assemble: Callable[[], Built], rollouts: list[Rollout]
) -> None:
    teacher = assemble().teacher
    for signal in SIGNALS:
        answers = teacher.score(rollouts, signal) if can(teacher, signal) else []
        assert len(answers) in (0, len(rollouts))
        for rollout, answer in zip(rollouts, answers, strict=False):
            assert not answer.is_empty
            for one in spoken(answer):
                given = tensors(one)
                assert given, "an answer says something"
                assert all(len(value) == len(rollout.tokens) for value in given.values())
                assert all(torch.isfinite(value).all() for value in given.values())
                assert not any(value.requires_grad for value in given.values())
                assert signal.name != "sampled" or one.logprobs is not None or one.head is not None
                assert signal.name != "full" or (one.hidden is not None and one.head is not None)
                if one.hidden is not None and one.head is not None:
                    mass = one.head.logprobs(one.hidden).logsumexp(-1)
                    torch.testing.assert_close(mass, torch.zeros_like(mass), atol=1e-5, rtol=0)


def test_a_teacher_of_no_signals_is_silent(
    assemble: Callable[[], Built], rollouts: list[Rollout]
) -> None:
    teacher = assemble().teacher
    if not teacher.capabilities.signals:
        answers = teacher.score(rollouts, Full())
        assert len(answers) == len(rollouts) and all(answer.is_empty for answer in answers)


def test_scoring_twice_gives_the_same_bits(
    assemble: Callable[[], Built], rollouts: list[Rollout]
) -> None:
    teacher = assemble().teacher
    for signal in filter(lambda signal: can(teacher, signal), SIGNALS):
        assert_same(teacher.score(rollouts, signal), teacher.score(rollouts, signal))


def test_scoring_after_training_mode_gives_the_same_bits(
    assemble: Callable[[], Built], rollouts: list[Rollout]
) -> None:
    built = assemble()
    once = built.teacher.score(rollouts, Sampled())
    built.trainer.language_model.model.train()
    assert_same(once, built.teacher.score(rollouts, Sampled()))


def test_the_order_of_rollouts_is_the_order_of_answers(
    assemble: Callable[[], Built], rollouts: list[Rollout]
) -> None:
    teacher = assemble().teacher
    forwards = teacher.score(rollouts, Sampled())
    backwards = teacher.score(rollouts[::-1], Sampled())[::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert one.name == other.name
        for name, value in tensors(one).items():
            torch.testing.assert_close(value, tensors(other)[name], rtol=1e-5, atol=1e-5)


def test_no_rollouts_need_no_answers(assemble: Callable[[], Built]) -> None:
    assert assemble().teacher.score([], Sampled()) == []


def test_saved_and_loaded_it_scores_the_same(
    assemble: Callable[[], Built], rollouts: list[Rollout], data: list[Datum]
) -> None:
    built = assemble()
    built.learn(data)
    state = {name: value.clone() for name, value in built.teacher.save_state().items()}
    weights = {
        stem: {k: v.clone() for k, v in named.items()}
        for stem, named in built.trainer.save_state().items()
    }
    other = assemble()
    other.trainer.load_state(weights)
    other.teacher.load_state(state)
    assert_same(built.teacher.score(rollouts, Sampled()), other.teacher.score(rollouts, Sampled()))
    assert other.teacher.save_state().keys() == state.keys()


def test_its_own_answers_are_aligned_with_the_prompts_where_it_writes_any(
    assemble: Callable[[], Built], rollouts: list[Rollout], params: SamplingParams
) -> None:
    teacher = assemble().teacher
    requests = [TeacherRequest(rollout.prompt, seed) for seed, rollout in enumerate(rollouts[:3])]
    answers = teacher.sample(requests, params)
    assert (answers is not None) == teacher.capabilities.writes
    assert answers is None or len(answers) == 3
    for answer in answers or []:
        assert 1 <= len(answer.tokens) <= params.max_new_tokens


def test_its_voice_writes_what_it_writes(
    assemble: Callable[[], Built], rollouts: list[Rollout], params: SamplingParams
) -> None:
    teacher = assemble().teacher
    prompt = rollouts[0].prompt
    voice = teacher.bind_prompt(prompt)
    assert (voice is not None) == teacher.capabilities.writes
    if voice is not None:
        (written,) = voice.client.sample([SampleRequest(voice.prompt_tokens, 7)], params)
        (answer,) = teacher.sample([TeacherRequest(prompt, 7)], params) or []
        assert written.tokens.equal(answer.tokens)
