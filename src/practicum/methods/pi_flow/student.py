"""The student of backend `flow`: its sampler, its trainer, and its checkpoints."""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import (
    CapabilityError,
    CheckpointError,
    DataError,
    RecipeError,
    TeacherError,
)
from practicum.functional.chunked import BufferPool, chunks
from practicum.functional.head import Head
from practicum.losses import build_chunk, build_token_batch, compile_objective
from practicum.losses.measures import UpdateStatistics, compare, measure
from practicum.losses.passes import Part, build_score_requests, pack_signals
from practicum.losses.token_axis import compute_all_coefficients
from practicum.methods.pi_flow.network import FlowInterval, FlowNetwork, FlowShape
from practicum.methods.pi_flow.values import (
    build_head,
    build_renderer,
    list_times,
    predict_next,
    read_trajectories,
    write_trajectories,
)
from practicum.models.config import ScorerConfig, ScratchConfig, StudentConfig
from practicum.models.digests import ModelRecord
from practicum.models.tensors import copy_to_host, read_parts, write_stems
from practicum.objective import EVERY_SIGNAL, Full, Objective, Signal
from practicum.ports import (
    AdamParams,
    Backend,
    BackendContext,
    Capabilities,
    Model,
    SamplingClient,
    SelfTeacher,
    Student,
    WeightUpdateRule,
)
from practicum.types import (
    Datum,
    ForwardResult,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

CHUNK_TOKENS = 2048
"""The tokens with [., V] log-probabilities in memory at once."""


class FlowClient(SamplingClient):
    """Sample and score with a network; see `practicum.ports.SamplingClient`."""

    def __init__(self, network: FlowNetwork) -> None:
        self._network = network

    @property
    def capabilities(self) -> Capabilities:
        """Every signal."""
        return EVERY_SIGNAL

    @torch.no_grad()
    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Write the trajectory of each request's noise."""
        network, opened = self._network, list[FlowInterval]()
        substates = network.shape.substates
        times = list_times(substates)

        def compute(number: int, state: Tensor) -> Tensor:
            if number % network.shape.substeps == 0:
                opened[:] = [network.open_interval(state, times[number])]
            return network.compute_velocity(opened[0], state, times[number])

        shape = substates, network.dimension
        return write_trajectories(requests, params, shape, compute) if requests else []

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return the hidden states that predict each number, and the head."""
        head = build_head(self._network.shape.substates)
        rows = read_hidden(self._network, requests) if requests else ()
        return [TeacherSignal(hidden=hidden, head=head) for hidden in rows]


def read_hidden(network: FlowNetwork, requests: Sequence[ScoreRequest]) -> Float[Tensor, "B T 2"]:
    """Return the hidden states that predict the numbers of trajectories.

    The states are tokens, so the gradient only reaches the network through its velocities there.
    """
    prompts = [request.prompt_tokens for request in requests]
    states = read_trajectories(prompts, [row.tokens for row in requests], network.dimension)
    if states.shape[1] != network.shape.substates + 1:
        raise DataError(
            f"a trajectory has {states.shape[1] - 1} substates, and the student's have "
            f"{network.shape.substates}; set backend.steps and backend.substeps of the trajectories"
        )
    states = states[:, :-1]
    hidden = predict_next(states, network.read_velocities(states), network.shape.substates)
    return hidden.flatten(1, 2)


class FlowTrainer:
    """Train a network; see `practicum.ports.TrainingClient`."""

    def __init__(self, network: FlowNetwork) -> None:
        self.network = network
        self.parameters = dict(network.named_parameters())
        self._optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)
        self._buffers = BufferPool()

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Explain why a flow cannot learn from the objective; return None if it can."""
        terms = objective.losses
        if all(isinstance(term.signal, Full) and term.gradient.pathwise for term in terms):
            return None
        return (
            "objective: a flow learns from velocities at every substate; set objective: {signal: "
            "full, divergence: mse}"
        )

    def snapshot(self) -> FlowClient:
        """Return a client with a copy of the network."""
        return FlowClient(copy.deepcopy(self.network))

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Accumulate the gradient of the objective at the substates of all rollouts."""
        rollouts = [datum.rollout for datum in data]
        head = build_head(self.network.shape.substates)
        batch, compiled = build_token_batch(data, objective, seed), compile_objective(objective)
        records = UpdateStatistics(len(batch.tokens), torch.device("cpu"))
        signal = pack_signals([datum.signal for datum in data], rollouts)
        reference = pack_signals([datum.reference for datum in data], rollouts)
        part = Part(torch.arange(len(batch.tokens)), batch, signal, reference)
        _require_velocities(signal, head)
        with torch.enable_grad():
            hidden = read_hidden(self.network, build_score_requests(rollouts))
            hidden = hidden[torch.stack([rollout.loss_mask for rollout in rollouts])]
        gradient = torch.zeros_like(hidden)
        for piece in chunks(len(hidden), CHUNK_TOKENS):
            signals, tokens = (signal[piece], reference[piece]), batch[piece]
            chunk = build_chunk(
                head, hidden.detach()[piece], signals, tokens, compiled, self._buffers
            )
            coefficients = compute_all_coefficients(compiled.tokens, chunk.values, tokens)
            compare(records, chunk, part, piece)
            measure(records, chunk.values, tokens, signals[0], compiled)
            gradient[piece] = chunk.backward(coefficients)
            records.record_coefficients(part.index[piece], signal.name, chunk.values, coefficients)
        if not records.is_broken and not records.has_no_supervision:
            hidden.backward(gradient)
        return records.build_result(data, data)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of AdamW on the clipped gradient; skip a gradient that is not finite."""
        gradients = [weight.grad for weight in self.parameters.values() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        is_finite = bool(norm.isfinite())
        if is_finite and gradients:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters.values(), params.max_grad_norm, norm
            )
            self._optimizer.param_groups[0].update(
                lr=params.learning_rate,
                betas=params.betas,
                eps=params.epsilon,
                weight_decay=params.weight_decay,
            )
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm.item(),
            "skipped": float(not is_finite),
            "empty_updates": float(not gradients),
            "learning_rate": params.learning_rate,
        }

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Return weights (`student`) and moments (`optimizer`)."""
        weights = {name: weight.detach() for name, weight in self.parameters.items()}
        moments = {
            f"{name}/{moment}": tensor
            for name, weight in self.parameters.items()
            for moment, tensor in self._optimizer.state.get(weight, {}).items()
        }
        return {"student": weights, "optimizer": moments}

    @torch.no_grad()
    def load_state(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Restore weights and moments; raise CheckpointError if they are of another network."""
        expected = {name: weight.shape for name, weight in self.parameters.items()}
        if expected != {name: tensor.shape for name, tensor in weights.items()}:
            raise CheckpointError(
                "the state is of another flow; resume with the student, backend and task that it "
                "was saved with"
            )
        for name, weight in self.parameters.items():
            weight.copy_(weights[name])
        self._optimizer.state.clear()
        for key, tensor in moments.items():
            name, moment = key.rsplit("/", 1)
            self._optimizer.state[self.parameters[name]][moment] = tensor.clone()


def _require_velocities(signal: TeacherSignal, head: Head) -> None:
    """Raise TeacherError unless a teacher's states are read by the same head."""
    if signal.head is None or signal.head.key != head.key:
        raise TeacherError(
            "the teacher gives no velocities at the substates of the student; set teacher: {type: "
            "velocity}"
        )


class FlowBackend(Backend):
    """See `practicum.ports.Backend`."""

    def __init__(self, shape: FlowShape, context: BackendContext) -> None:
        self._shape, self._context = shape, context

    def load_student(self, config: StudentConfig) -> Student:
        """Make the network, whose dimension is the number of values in the task's prompts."""
        model, renderer = config.model, build_renderer()
        assert isinstance(model, ScratchConfig), "the recipe was checked for another model"
        prompts = self._context.task().train_prompts()
        dimension = len(renderer.render(prompts[0].messages)) if prompts else 0
        if not dimension:
            raise DataError("task: its first prompt has no values; set task: {type: mixture}")
        seed = seed_of(self._context.seed, "flow", model.seed)
        network = FlowNetwork(self._shape, dimension, model.hidden_size, model.layers, seed)
        trainer = FlowTrainer(network)
        weights = network.state_dict()
        facts = [self._shape, *(weights[name].tolist() for name in weights)]
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()
        return Student(
            trainer=trainer,
            renderer=renderer,
            context_length=dimension * (network.shape.substates + 1),
            source="a flow from scratch",
            weights=trainer.parameters,
            state_bytes=sum(3 * weight.nbytes + 2560 for weight in weights.values()),
            record=ModelRecord("a flow from scratch", {"network": digest}, {}),
        )

    def load_scorer(self, config: ScorerConfig, name: str) -> Model:
        """Refuse: a flow is not scored by a language model."""
        raise CapabilityError(
            f"{name}: backend 'flow' loads no language models; set teacher: {{type: velocity}}"
        )

    def build_sampler(self, student: Student) -> FlowClient:
        """Return a client of the live weights."""
        return FlowClient(_require_flow(student).network)

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> SelfTeacher:
        """Refuse: a flow is no teacher of itself."""
        raise CapabilityError(
            f"{name}: backend 'flow' keeps no copy of the student; set teacher: {{type: velocity}}"
        )

    def save(self, student: Student, folder: Path) -> None:
        """Write weights and moments."""
        self.copy_state(student)(folder)

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        """Copy weights and moments; return a function that writes the copy."""
        state = _require_flow(student).save_state()
        return partial(write_stems, {stem: copy_to_host(part) for stem, part in state.items()})

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        """Restore a checkpoint, without the moments if `moments` is False."""
        optimizer = read_parts(folder, "optimizer") if moments else {}
        _require_flow(student).load_state(read_parts(folder, "student"), optimizer)

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        """Refuse: no other engine reads a flow."""
        raise RecipeError(
            f"{folder.name}: a flow has no model folder; its weights are in the run's checkpoints"
        )


def _require_flow(student: Student) -> FlowTrainer:
    assert isinstance(student.trainer, FlowTrainer), "a backend is given the students it made"
    return student.trainer
