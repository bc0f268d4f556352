"""The examples run, and the library computes the loss and gradient of the one in plain PyTorch."""

import copy
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from toy import toy_recipe

import practicum
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.objective import Full, Objective
from practicum.types import Datum, Prompt, Rollout, ScoreRequest

EXAMPLES = Path(__file__).parents[1] / "examples"
PATH = EXAMPLES / "minimal.py"


def load_example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


minimal = load_example("minimal")


@pytest.mark.long
def test_the_divergence_falls(capsys: pytest.CaptureFixture[str]) -> None:
    minimal.main()
    values = [float(value) for value in re.findall(r"KL ([0-9.]+)", capsys.readouterr().out)]
    assert values[-1] < values[0] / 2


@pytest.mark.long
def test_rows_and_a_reward_of_your_own_train_the_student(tmp_path: Path) -> None:
    example = load_example("own_data")
    result = example.main(steps=2, out=str(tmp_path))
    assert (result.folder / "report.html").is_file()
    prompt = Prompt("p", (), answer="cba")
    assert [example.reward(reply, prompt) for reply in ("cba", "cbb", "cb")] == [1.0, 2 / 3, 0.0]


def test_it_imports_only_torch_transformers_and_the_mathematics() -> None:
    modules = re.findall(
        r"^(?:from|import) ([a-z_.]+)", PATH.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(modules) == {"torch", "transformers", "practicum"}


def test_the_library_has_the_same_loss_and_gradient() -> None:
    student, teacher = minimal.build_tiny_model(1, 32), minimal.build_tiny_model(2, 48)
    twin = copy.deepcopy(student)
    prompts = [[2, 3, 4], [5, 6, 7, 8], [9, 10]]
    generator = torch.Generator().manual_seed(0)
    answers = [minimal.sample_answer(student, prompt, generator) for prompt in prompts]
    loss = minimal.compute_loss(student, teacher, prompts, answers)
    loss.backward()
    requests = [ScoreRequest(tuple(p), tuple(a)) for p, a in zip(prompts, answers, strict=True)]
    scorer = LocalSampler(LanguageModel(teacher, minimal.VOCABULARY))
    data = [
        Datum(build_rollout(*pair), signal)
        for *pair, signal in zip(prompts, answers, scorer.score(requests, Full()), strict=True)
    ]
    trainer = LocalTrainer(LanguageModel(twin, minimal.VOCABULARY), TrainerLimits(chunk_tokens=5))
    metrics = trainer.forward_backward(data, Objective(), seed=0).metrics
    assert metrics["reverse_kl"] == pytest.approx(loss.item(), rel=1e-5)
    twins = dict(twin.named_parameters())
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(twins[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


def build_rollout(prompt: list[int], answer: list[int]) -> Rollout:
    unknown = torch.zeros(len(answer))
    return Rollout(
        prompt=Prompt(str(prompt), ()),
        prompt_tokens=tuple(prompt),
        tokens=torch.tensor(answer),
        loss_mask=torch.ones(len(answer), dtype=torch.bool),
        sampling_logprobs=unknown,
        policy_logprobs=unknown,
        policy_version=0,
        stop_reason="stop",
        text="",
    )


def test_an_own_step_without_a_choice_is_the_librarys(models: Path, tmp_path: Path) -> None:
    own_step = load_example("own_step")
    recipe = toy_recipe(models, {"train.steps": 3})
    rows = own_step.train(recipe, list)
    expected = practicum.run(recipe, out=tmp_path, progress=False).metrics()
    assert [row["reverse_kl"] for row in rows] == [row["reverse_kl"] for row in expected]


def test_an_own_step_trains_on_what_it_chooses(models: Path) -> None:
    own_step = load_example("own_step")
    recipe = toy_recipe(models, {"train.steps": 2})
    assert [row["trained"] for row in own_step.train(recipe, lambda rollouts: [])] == [0.0, 0.0]
    (row, _) = own_step.train(recipe, own_step.keep_mistakes)
    assert 0 < row["trained"] <= row["answers"]
