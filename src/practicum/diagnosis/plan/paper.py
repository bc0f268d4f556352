"""One step on paper: the real loop over the recipe's own prompts, with models that have sizes and no weights.

Every answer is taken to be `answer_tokens` long. What is asked of each model is kept, and counted by the ledger of a run.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from practicum.assembly import archive_of, build_task, fitting, plan_of_step, scorer_names, scratch_folder
from practicum.backends.local.graph import GraphPlan, plan_graph
from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.paper import BodyBytes, body_bytes, load_on_paper
from practicum.backends.local.passes import length_of
from practicum.backends.local.sizes import learning_of, shape_of
from practicum.costs import Learning, Ledger, Shape
from practicum.errors import DataError
from practicum.loop import Parts, StepSettings, train_step
from practicum.metering import MeteredTrainer
from practicum.model_config import ModelConfig, Pretrain, ScorerConfig, Scratch
from practicum.objective import Objective, Signal
from practicum.plugins import module_of
from practicum.ports import (
    AdamParams,
    Capabilities,
    MixedRequest,
    Reading,
    SamplingClient,
    ScoreRequest,
    SelfRule,
    Task,
    Teacher,
    TeacherContext,
)
from practicum.recipe import Recipe
from practicum.schedule import Courses
from practicum.text import Renderer
from practicum.types import (
    Datum,
    ForwardResult,
    Head,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    TeacherSignal,
    TokenOutputs,
)


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model that scores: its settings (None for the student's own weights), sizes, and what a pass through it takes."""

    config: ScorerConfig | None
    shape: Shape
    body: BodyBytes
    held: int = 0


@dataclass(slots=True)
class PaperStep:
    """What one step asks of whom."""

    metrics: Metrics = field(default_factory=dict)
    drawn: dict[str, list[SampleRequest]] = field(default_factory=dict)
    scored: dict[str, list[ScoreRequest]] = field(default_factory=dict)
    data: list[Datum] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PaperRun:
    """A recipe without weights: sizes, the step, and how the update is cut into passes."""

    recipe: Recipe
    shape: Shape
    learning: Learning
    body: BodyBytes
    graph: GraphPlan
    packs_up_to: int
    scorers: Mapping[str, Scorer]
    step: PaperStep
    answer_tokens: int


def paper_run(recipe: Recipe, answer_tokens: int | None, say: Callable[[str], None]) -> PaperRun:
    """Go through the first step of a recipe; answers have `answer_tokens`, or as many as they may."""
    tokens = min(answer_tokens or recipe.rollout.max_new_tokens, recipe.rollout.max_new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        return _Paper(recipe, tokens, Path(folder), say).run()


class _Paper:
    """The parts of a step while it is gone through."""

    def __init__(self, recipe: Recipe, answer_tokens: int, models: Path, say: Callable[[str], None]) -> None:
        self.recipe = recipe
        self.answer_tokens = answer_tokens
        self.models = models
        self.task: Task = build_task(recipe, None, say)
        self.ledger = Ledger()
        self.step = PaperStep()
        self.scorers: dict[str, Scorer] = {}
        self.student = self._load(recipe.student, "student")
        model = self.student.language_model
        self.shape, self.learning = shape_of(model), learning_of(model)
        self.ledger.shapes["student"] = self.shape
        self.body = body_bytes(recipe.student, self.student.source, self.learning.layers)

    def run(self) -> PaperRun:
        recipe, renderer = self.recipe, self.student.renderer
        prompts, too_long = fitting(self.task.train_prompts(), self.student, recipe)
        if not prompts:
            raise DataError(
                f"none of the {len(too_long)} training prompts fits in prompt_tokens ({recipe.prompt_tokens}); raise it"
            )
        trainer = PaperTrainer(self)
        metered = MeteredTrainer(trainer, self.shape, self.learning, self.ledger.meter("student"))
        parts = Parts(
            student=metered,
            teacher=self._teacher("teacher", recipe.teacher, trainer),
            task=self.task,
            renderer=renderer,
            prompts=prompts,
            reference=None if recipe.reference is None else self._teacher("reference", recipe.reference, trainer),
            archive=archive_of(recipe, prompts, renderer)[0],
            ledger=self.ledger,
        )
        courses = Courses(recipe.schedules, recipe.train.steps)
        settings = StepSettings(
            seed=recipe.seed,
            prompts_per_step=recipe.train.prompts_per_step,
            plan=lambda step: plan_of_step(recipe.at(courses.at(step)), renderer.stop_ids, step),
            updates=recipe.train.updates_per_step,
        )
        result = train_step(1, parts, settings)
        self.step.metrics = result.metrics
        self.step.prompts = list(dict.fromkeys(rollout.prompt_tokens for rollout in result.rollouts))
        graph = self.graph(self.step.data)
        body = self.body
        if graph.recompute:
            body = body_bytes(recipe.student, self.student.source, self.learning.layers, recompute=True)
        packs = self.student.language_model.packs_up_to
        return PaperRun(
            recipe, self.shape, self.learning, body, graph, packs, self.scorers, self.step, self.answer_tokens
        )

    def graph(self, data: Sequence[Datum]) -> GraphPlan:
        """How the trainer would cut an update, by what autograd keeps of a token."""
        limits = self.recipe.train
        if limits.micro_batch_tokens is not None:
            return GraphPlan(limits.micro_batch_tokens, recompute=False)
        longest = max((length_of(datum) for datum in data), default=1)
        model = self.student.language_model
        return plan_graph(model, max(self.body.kept.each, 1), longest, limits.graph_mib * 2**20)

    def client(self, name: str) -> "PaperClient":
        """A client that answers for a model without asking it."""
        drawn, scored = self.step.drawn.setdefault(name, []), self.step.scored.setdefault(name, [])
        return PaperClient(self.answer_tokens, drawn, scored)

    def _load(self, config: ModelConfig, role: str) -> LoadedModel:
        return load_on_paper(config, self._scratch(config, role))

    def _scratch(self, config: ModelConfig, role: str) -> Path | None:
        if not isinstance(config.model, Scratch):
            return None
        bare = config.model.model_copy(update={"pretrain": Pretrain(steps=0)})
        return scratch_folder(self.recipe, config.model_copy(update={"model": bare}), role, self.models, self.task)

    def _teacher(self, role: str, config: Any, trainer: "PaperTrainer") -> Teacher:
        names = scorer_names(role, config)

        def load_model(config: ScorerConfig) -> tuple[SamplingClient, Renderer]:
            name = names.get(id(config), role)
            loaded = self._load(config, name.replace("/", "-"))
            shape = self.ledger.shapes[name] = shape_of(loaded.language_model)
            self.scorers[name] = Scorer(config, shape, body_bytes(config, loaded.source))
            return self.client(name), loaded.renderer

        def build(context: TeacherContext, config: Any) -> Teacher:
            name = names.get(id(config))
            if name is not None:
                named = PaperTrainer(self, name)
                context = replace(context, meter=self.ledger.meter(name), student=named)
                if config.type == "self":
                    self.ledger.shapes[name] = self.shape
                    held = 0 if config.weights == "live" else self.learning.parameters
                    self.scorers[name] = Scorer(None, self.shape, self.body, held)
            return module_of("teachers", config.type).build(config, context)

        base_dir = Path(self.recipe.base_dir)
        context = TeacherContext(trainer, self.student.renderer, load_model, build, base_dir, task=self.task)
        return build(context, config)


class PaperClient:
    """Draws and scores without a model; see `practicum.ports.SamplingClient`."""

    def __init__(self, answer_tokens: int, drawn: list[SampleRequest], scored: list[ScoreRequest]) -> None:
        self._answer_tokens = answer_tokens
        self._drawn = drawn
        self._scored = scored

    @property
    def capabilities(self) -> Capabilities:
        """Everything, as a local model."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}))

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Answers of the length that is assumed."""
        self._drawn.extend(requests)
        count = min(params.max_new_tokens, self._answer_tokens)
        ids = torch.zeros(count, dtype=torch.long)
        return [Sample(ids, torch.zeros(count), torch.zeros(count), "length") for _ in requests]

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Log-probabilities or hidden states of the right length, and of no width."""
        self._scored.extend(requests)
        if signal.type == "sampled":
            return [TeacherSignal(logprobs=torch.zeros(len(request.tokens))) for request in requests]
        head = Head(torch.zeros(1, 1), 1)
        return [TeacherSignal(hidden=torch.zeros(len(request.tokens), 1), head=head) for request in requests]

    def sample_mixed(
        self, requests: Sequence[MixedRequest], teacher: object, share: float, params: SamplingParams
    ) -> list[Sample]:
        """As `sample`."""
        return self.sample([SampleRequest(request.prompt_tokens, request.seed) for request in requests], params)

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> Reading:
        """Nothing is read on paper: both sides of a mixture are counted where it is drawn."""
        raise AssertionError("paper is not read token by token")

    def after_step(self, step: int) -> None:
        """Nothing follows."""

    def save_state(self) -> dict[str, Tensor]:
        """Nothing to save."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing was saved."""


class PaperTrainer:
    """Learns nothing; see `practicum.ports.TrainingClient`."""

    def __init__(self, paper: _Paper, name: str = "student") -> None:
        self._paper = paper
        self._name = name

    def forward_backward(self, data: Sequence[Datum], objective: Objective, seed: int) -> ForwardResult:
        """Keep the data, and apply the teachers' heads as often as a trainer does."""
        self._paper.step.data.extend(data)
        for datum in data:
            for head in (*datum.signal.heads, *datum.reference.heads):
                for _ in range(1 + objective.needs_sequences):
                    head.logprobs(torch.zeros(int(datum.rollout.loss_mask.sum()), 1))
        silent = [torch.zeros(len(datum.rollout.tokens)) for datum in data]
        again = {"recomputed": 1.0} if self._paper.graph(data).recompute else {}
        supervised = [int(datum.rollout.loss_mask.sum()) for datum in data]
        metrics = {"tokens": float(sum(supervised)), **again}
        return ForwardResult(metrics, [TokenOutputs(*[zeros] * 7) for zeros in silent], supervised)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Nothing moves."""
        return {}

    def sampling_client(self) -> PaperClient:
        """The student on paper."""
        return self._paper.client("student")

    def snapshot(self) -> PaperClient:
        """The same."""
        return self.sampling_client()

    def self_teacher(self, rule: SelfRule) -> PaperClient:
        """The student's weights as a scorer, on paper."""
        return self._paper.client(self._name)

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Nothing to save."""
        return {}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Nothing was saved."""

    def refuses(self, objective: Objective) -> str | None:
        """Paper takes every objective."""
        return None
