"""The one-page example runs, and the library takes the same first steps."""

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
from practicum.ports import AdamParams
from practicum.types import Datum, Prompt, Rollout, SampleRequest, SamplingParams, ScoreRequest

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


def test_it_imports_only_torch_transformers_and_the_mathematics() -> None:
    modules = re.findall(
        r"^(?:from|import) ([a-z_.]+)", PATH.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(modules) == {"torch", "transformers", "practicum"}


def test_the_library_takes_the_same_steps() -> None:
    student, teacher = minimal.build_tiny_model(1, 32), minimal.build_tiny_model(2, 48)
    twin = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.0)
    trainer = LocalTrainer(LanguageModel(twin, minimal.VOCABULARY), TrainerLimits(chunk_tokens=5))
    scorer = LocalSampler(LanguageModel(teacher, minimal.VOCABULARY))
    prompts = [[2, 3, 4], [5, 6, 7, 8], [9, 10]]
    for step in range(1, 4):
        seeds = [10 * step + place for place in range(len(prompts))]
        expected = [
            minimal.sample_answer(student, prompt, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        divergence = minimal.distil(student, teacher, optimizer, prompts, seeds)
        found, measured = library_step(trainer, scorer, prompts, seeds, step)
        assert found == expected
        assert measured == pytest.approx(divergence, rel=1e-4)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(
            dict(twin.named_parameters())[name], parameter, rtol=1e-4, atol=1e-5
        )


def library_step(
    trainer: LocalTrainer,
    scorer: LocalSampler,
    prompts: list[list[int]],
    seeds: list[int],
    step: int,
) -> tuple[list[list[int]], float]:
    requests = [
        SampleRequest(tuple(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    params = SamplingParams(minimal.LONGEST, stop_ids=frozenset({minimal.STOP}))
    samples = trainer.build_sampling_client().sample(requests, params)
    rollouts = [
        Rollout(
            prompt=Prompt(str(place), ()),
            prompt_tokens=request.prompt_tokens,
            tokens=sample.tokens,
            loss_mask=torch.ones_like(sample.tokens, dtype=torch.bool),
            sampling_logprobs=sample.sampling_logprobs,
            policy_logprobs=sample.policy_logprobs,
            policy_version=step - 1,
            stop_reason=sample.stop_reason,
            text="",
        )
        for place, (request, sample) in enumerate(zip(requests, samples, strict=True))
    ]
    scores = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    data = [Datum(*pair) for pair in zip(rollouts, scorer.score(scores, Full()), strict=True)]
    metrics = trainer.forward_backward(data, Objective(), seed=step).metrics
    trainer.optim_step(AdamParams(1e-3))
    return [sample.tokens.tolist() for sample in samples], metrics["reverse_kl"]


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
