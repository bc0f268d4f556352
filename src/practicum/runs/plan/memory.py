"""Peak memory by phase: the items that are alive at once, as the local backend holds them."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice

import psutil
import torch

from practicum.core.ram import read_total_memory
from practicum.costs import ModelDims, TrainableDims
from practicum.costs.segments import count_packed_tokens, split_by_tokens
from practicum.errors import PracticumError, ResourceError
from practicum.losses import compile_objective
from practicum.losses.passes import build_score_requests, group_rows_into_passes
from practicum.models.config import StudentConfig
from practicum.models.quantization import count_weight_bytes
from practicum.models.sources import find_base
from practicum.objective import Objective
from practicum.ports.paper import PaperRecord, PaperScalarDims
from practicum.runs.plan.dry_runs import DryRun
from practicum.training.teacher_comparison import COMPARED_TOKENS
from practicum.types import Rollout, ScoreRequest

FLOAT_BYTES = 4
MIB = 2**20

LIBRARY_BYTES = 96 * MIB
"""Tokenizers, modules that libraries load at first use, and the allocator's cache; measured by
`python -m benchmarks plan`."""

ADAPTER_FRAGMENTATION = 2
"""The factor by which the allocator takes more than the graph holds, with adapters.

Their small tensors keep the room between the large ones from being used again. Measured on
SmolLM2-135M on a processor (`python -m benchmarks plan --cases adapters`).
"""

CONTEXT_BYTES = 512 * MIB
"""The CUDA context and the libraries' workspaces on a GPU; an assumption."""

SAMPLING_TILES = 4
"""Matrices of [rows, V] that sampling holds: logits, their exponentials, sums in float64."""

SCORED_TILES = 2
"""Matrices of [chunk_tokens, V] for the log-probabilities of given tokens: logits, and their log-softmax."""

COMPARED_TILES = 5
"""Matrices of [tokens, V] that an evaluation holds for the tokens that it compares at once."""

FUSED_TILES, TOKEN_TILES, AUTOGRAD_TILES = 6, 4, 12
"""Matrices of [chunk_tokens, V] of the logit side: fused with a teacher's distribution, fused
with only its sampled tokens, and by autograd."""

BYTE_UNITS = {"b": 1, "kb": 1e3, "kib": 2**10, "mb": 1e6, "mib": 2**20, "gb": 1e9, "gib": 2**30}


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of each item in each phase.

    A phase takes the sum of its items, a run as much as its largest phase.
    """

    phases: Mapping[str, Mapping[str, int]]

    def of(self, phase: str) -> int:
        """Return the bytes of a phase."""
        return sum(self.phases[phase].values())

    @property
    def largest(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.of)

    @property
    def peak(self) -> int:
        """The bytes of the largest phase."""
        return self.of(self.largest)


def estimate_memory(run: DryRun, process: int) -> Memory:
    """Estimate the memory of each phase of a step once the optimizer has its moments.

    `process` is the memory of Python and its libraries in bytes; on a GPU it does not count.
    """
    recipe, record, is_gpu = run.recipe, run.record, run.gpu is not None
    away = ("disk", "shared", "swap") if is_gpu else ("disk", "shared")
    # Trained weights are stored in float32 for every dtype of the student.
    trained = FLOAT_BYTES * record.trainable_dims.parameters
    student = recipe.student.model_copy(update={"dtype": record.dtype})
    vocabulary_row = FLOAT_BYTES * record.dims.vocabulary
    resident, visiting, layouts = [0], [0], [0]
    bases: dict[str, int] = {}
    for name, scorer in record.scorers.items():
        size, config = _count_weight_bytes(run, name), scorer.config
        if config is not None and config.residency in away:
            # Merged weights are counted as if the adapter changed all of them.
            visiting.append(size + scorer.layout_bytes)
            if config.residency == "shared":
                bases[find_base(str(config.model))] = size
        else:
            resident.append(size)
            layouts.append(scorer.layout_bytes)
    fitted = FLOAT_BYTES * sum(s.trainable_dims.parameters for s in record.scalars.values())
    always = {
        "CUDA context": CONTEXT_BYTES if is_gpu else 0,
        "Python and libraries": 0 if is_gpu else process + LIBRARY_BYTES,
        "student": count_frozen_bytes(student, record.dims, record.trainable_dims) + trained,
        "teachers": sum(resident) + sum(bases.values()),
        "scorers that learn": fitted + sum(map(_count_scalar_bytes, record.scalars.values())),
        "weights laid out for scoring": sum(layouts),
        "self-teachers' copies": FLOAT_BYTES
        * sum(scorer.num_copied_weights for scorer in record.scorers.values()),
        "moments of AdamW": 2 * (trained + fitted),
        "logit side": _measure_loss(run)[0],
        "weights kept laid out for decoding": _count_cached_weights(run),
    }
    if recipe.train.save_in_background and not is_gpu:
        always["copy of the state being saved"] = 3 * (trained + fitted)
    hidden = _count_hidden_bytes(run)
    lag = recipe.rollout.max_staleness
    if lag:
        always["copies of what learns, for rollouts ahead"] = (lag + 1) * trained
        always["hidden states of steps ahead"] = lag * hidden
    completions = len(record.sample_requests.get("student", ()))
    sample = _estimate_sampling(run, completions, recipe.rollout.max_new_tokens)
    # A conversation samples in many requests, so the rollouts are counted.
    rollouts = round(run.metrics["rollouts"])
    sample |= _estimate_cached_texts(run, rollouts, recipe.rollout.max_new_tokens)
    # At most one teacher is read from disk or merged at a time, so the largest one counts.
    score = {
        "a visiting teacher": max(visiting),
        "activations or logits": max(_estimate_scoring(run), _estimate_scored_logits(run)),
        "hidden states": hidden,
    }
    update = {"gradients": trained + fitted, "hidden states": hidden, **_estimate_update(run)}
    phases = {
        "sample": always | sample,
        "score": always | score,
        # With rollouts ahead, other threads sample and score during the update.
        "update": always | sample | score | update if lag else always | update,
    }
    if not is_gpu:
        phases["save"] = always | {"files being written": 2 * (trained + fitted)}
    if recipe.evaluation.prompts:
        completions = recipe.evaluation.prompts * recipe.evaluation.samples
        length = recipe.evaluation.max_new_tokens or recipe.rollout.max_new_tokens
        sampling = _estimate_sampling(run, completions, length)
        sampling |= _estimate_cached_texts(run, completions, length)
        compared = COMPARED_TOKENS * COMPARED_TILES * vocabulary_row
        # An evaluation samples first and compares distributions after it, so the larger one counts.
        if compared > sum(sampling.values()):
            sampling = {"compared distributions": compared}
        phases["evaluate"] = always | sampling
    return Memory(
        {
            phase: {name: size for name, size in items.items() if size}
            for phase, items in phases.items()
        }
    )


def count_tiles(objective: Objective) -> int:
    """Count the matrices of [chunk_tokens, V] that the logit side of an objective holds."""
    if not compile_objective(objective).fuses():
        return AUTOGRAD_TILES
    if objective.signal is None or objective.signal.type != "full":
        return TOKEN_TILES
    # Each further term holds its slope over the vocabulary.
    return FUSED_TILES + max(len(objective.losses) - 1, 0)


def _measure_loss(run: DryRun) -> tuple[int, int]:
    """Return the bytes of the logit side that chunks reuse, and its peak in a chunk of an update."""
    objective = run.recipe.objective
    supervised = max(
        (sum(int(rollout.loss_mask.sum()) for rollout in batch) for batch in _list_batches(run)),
        default=0,
    )
    tokens = min(run.record.chunk_tokens, supervised)
    size = count_tiles(objective) * FLOAT_BYTES * run.record.dims.vocabulary * tokens
    if run.gpu is None:
        return size, size
    try:
        return run.record.measure_loss(objective, tokens)
    except (RuntimeError, PracticumError):
        return 0, size  # a loss that depends on numbers


def estimate_fragmentation(run: DryRun) -> int:
    """Return the factor by which an update takes more memory than its graph holds."""
    return ADAPTER_FRAGMENTATION if run.record.trainable_dims.adapters and run.gpu is None else 1


def count_update_tokens(run: DryRun) -> int:
    """Count the tokens of the largest micro-batch of the update."""
    batches = _list_batches(run)
    return max((count_packed_tokens(build_score_requests(batch)) for batch in batches), default=0)


def _list_batches(run: DryRun) -> list[list[Rollout]]:
    """Return the texts of each micro-batch of the update."""
    datums = run.record.datums
    passes = group_rows_into_passes(datums, run.graph.tokens, run.record.max_packed_tokens)
    return [[datums[row].rollout for row in rows] for rows, *_ in passes]


def read_memory_limit(device: str) -> int:
    """Return the bytes of memory that a run may take.

    Free memory of the GPU; else the machine's memory, or the limit of the process's cgroup if less.
    """
    return torch.cuda.mem_get_info()[0] if device == "cuda" else read_total_memory()


# Cached, so that a second plan in one process does not count the first plan's own memory.
@cache
def measure_process() -> int:
    """Return the resident memory of this process, in bytes, at the first call."""
    return psutil.Process().memory_info().rss


def parse_bytes(text: str) -> int:
    """Parse `8GiB`, `512 MiB`, `16GB` or a number of bytes; ResourceError for anything else."""
    amount = text.strip().lower()
    number = amount.rstrip("kmgib ")
    unit = amount[len(number) :].strip()
    try:
        size = int(float(number) * BYTE_UNITS[unit or "b"])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise ResourceError(
            f"--memory {text!r} is not an amount of memory; use for example 8GiB or 512MiB"
        )
    return size


def get_item_bytes(dtype: str) -> int:
    """Return the bytes of a weight in a dtype of a recipe."""
    return FLOAT_BYTES if dtype == "float32" else 2


def _count_weight_bytes(run: DryRun, name: str) -> int:
    """Return the bytes of a scorer's weights; 0 if it scores with the student's."""
    scorer = run.record.scorers[name]
    if scorer.config is None:
        return 0
    item_bytes = get_item_bytes(scorer.config.dtype)
    dims, quantization = scorer.dims, scorer.config.quantization
    return count_weight_bytes(dims.parameters, dims.body, item_bytes, quantization)


def count_frozen_bytes(config: StudentConfig, dims: ModelDims, learning: TrainableDims) -> int:
    """Return the bytes of the weights of a student or a scorer that do not learn."""
    frozen, item_bytes = dims.parameters - learning.parameters, get_item_bytes(config.dtype)
    return count_weight_bytes(frozen, dims.body, item_bytes, config.quantization)


def _count_scalar_bytes(scalar: PaperScalarDims) -> int:
    return count_frozen_bytes(scalar.config, scalar.dims, scalar.trainable_dims)


def sends_hidden(run: DryRun, name: str) -> bool:
    """Return True if a scorer answers with hidden states instead of a number per token."""
    objective = run.recipe.objective
    signals = {"teacher": objective.signal, "reference": objective.reference_signal}
    signal = signals.get(name.partition("/")[0])
    return signal is not None and signal.type != "sampled"


def _count_hidden_bytes(run: DryRun) -> int:
    """Return the bytes of the hidden states that teacher and reference answer with."""
    record, size = run.record, 0
    for name, requests in record.score_requests.items():
        if name in record.scorers and sends_hidden(run, name):
            tokens = sum(len(request.tokens) for request in requests)
            states = _get_state_bytes(run, name) * record.scorers[name].dims.width * tokens
            size += min(states, record.max_hidden_bytes)
    return size


def _get_state_bytes(run: DryRun, name: str) -> int:
    """Return the bytes of a number in a scorer's hidden states."""
    config, record = run.record.scorers[name].config, run.record
    if run.gpu is None or (config is None and record.trainable_dims.head):
        return FLOAT_BYTES
    return get_item_bytes(record.dtype if config is None else config.dtype)


def _estimate_sampling(run: DryRun, completions: int, new_tokens: int) -> dict[str, int]:
    """Return the bytes of decoding: prepacked weights, the KV cache, and the logits of a step."""
    record, dims = run.record, run.record.dims
    if run.gpu is not None:
        rollout = run.recipe.rollout
        # The last turns of conversations are the longest, and one turn of each is sampled at once.
        requests = [request.prompt_tokens for request in record.sample_requests.get("student", ())]
        most = min(completions, round(run.metrics["rollouts"])) if run.converses else completions
        prompts = list(islice(cycle(reversed(requests or run.prompts)), most))
        params = replace(rollout.build_sampling_params(frozenset({0})), max_new_tokens=new_tokens)
        is_rollout = new_tokens == rollout.max_new_tokens
        length = run.answer_tokens if is_rollout else new_tokens
        return dict(record.measure_sampling(prompts, length, params)) if prompts else {}
    rows = min(record.sampling_batch, completions)
    max_tokens = max(map(len, run.prompts), default=0) + new_tokens
    is_prepacked = rows > 0 and _is_prepacked(run, new_tokens)
    # Packed weights are not laid out again.
    body = 0 if run.recipe.student.quantization else dims.body
    laid_out = FLOAT_BYTES * (body + dims.head) - _count_cached_weights(run)
    return {
        "weights laid out for decoding": laid_out if is_prepacked else 0,
        "keys and values": dims.count_kv_bytes(rows * max_tokens, get_item_bytes(run.record.dtype)),
        "logits": rows * dims.vocabulary * FLOAT_BYTES * SAMPLING_TILES,
    }


def _estimate_cached_texts(run: DryRun, conversations: int, new_tokens: int) -> dict[str, int]:
    """Return the bytes of keys and values that conversations keep from turn to turn."""
    if not run.converses:
        return {}
    tokens = conversations * (max(map(len, run.prompts), default=0) + new_tokens)
    size = run.record.dims.count_kv_bytes(tokens, get_item_bytes(run.record.dtype))
    return {"keys and values of conversations": min(size, run.record.max_text_bytes)}


def _is_prepacked(run: DryRun, new_tokens: int) -> bool:
    """Return True if decoding lays out the student's weights, which only pays off for many
    tokens."""
    return (
        run.record.dtype == "float32"
        and platform.machine().lower() in ("x86_64", "amd64")
        and new_tokens >= run.record.min_prepack_tokens
        and torch.backends.mkldnn.is_available()
    )


def _count_cached_weights(run: DryRun) -> int:
    """Return the bytes of the student's frozen weights with laid-out copies that outlive a step.

    Only the compiled step keeps such copies; the plan does not know which kind of step will decode.
    """
    record = run.record
    # The compiled step reads no packed weights.
    new_tokens = run.recipe.rollout.max_new_tokens
    if run.recipe.student.quantization or not _is_prepacked(run, new_tokens):
        return 0
    dims, learning = record.dims, record.trainable_dims
    frozen = dims.body * (dims.layers - learning.layers) // dims.layers
    frozen += 0 if learning.head else dims.head
    return min(FLOAT_BYTES * frozen, record.max_kept_bytes)


def _estimate_scoring(run: DryRun) -> int:
    """Return the bytes of the largest forward pass of any scorer."""
    record, sizes = run.record, [0]
    for name, requests in record.score_requests.items():
        models = record.scorers if name in record.scorers else record.scalars
        if name in models and requests:
            tokens = _find_largest_pass(requests, record)
            sizes.append(models[name].body.forward.compute_bytes(tokens))
    return max(sizes)


def _estimate_scored_logits(run: DryRun) -> int:
    """Return the bytes of the logits of scorers on a GPU that answer with log-probabilities."""
    record = run.record
    rows = [
        min(record.chunk_tokens, max(len(request.tokens) for request in requests))
        * record.scorers[name].dims.vocabulary
        for name, requests in record.score_requests.items()
        if name in record.scorers and requests and not sends_hidden(run, name)
    ]
    return 0 if run.gpu is None else SCORED_TILES * FLOAT_BYTES * max(rows, default=0)


def _find_largest_pass(requests: Sequence[ScoreRequest], record: PaperRecord) -> int:
    """Return the tokens of the largest forward pass in which the requests are scored."""
    passes = split_by_tokens(requests, record.scored_tokens, record.max_packed_tokens)
    return max(count_packed_tokens(requests[part]) for part in passes)


def _estimate_update(run: DryRun) -> dict[str, int]:
    """Return the bytes of an update: the graph of its largest pass, and the prepacked head."""
    record = run.record
    tokens = count_update_tokens(run)
    # The loss is computed while the graph is there, and before its gradients.
    reused, peak = _measure_loss(run)
    loss = run.body.graph.compute_bytes(tokens) + peak - reused
    graph = max(run.body.update.compute_bytes(tokens), loss) * estimate_fragmentation(run)
    # A scorer learns after the student, in micro-batches of as many tokens.
    graph = max([graph, *(s.body.update.compute_bytes(tokens) for s in record.scalars.values())])
    head = FLOAT_BYTES * record.dims.head
    away = [
        get_item_bytes(scorer.config.dtype) * scorer.dims.head
        for scorer in record.scorers.values()
        if run.gpu is not None and scorer.config and scorer.config.residency in ("swap", "disk")
    ]
    rounded = run.gpu is not None and record.trainable_dims.head and record.dtype == "bfloat16"
    supervised = sum(int(datum.rollout.loss_mask.sum()) for datum in record.datums)
    return {
        # The embedding's second gradient comes after the graph is freed, so the larger one counts.
        "graph and its gradients": max(graph, head if record.trainable_dims.head else 0),
        "head laid out for products": head if supervised >= record.min_head_rows else 0,
        "head in bfloat16": head // 2 if rounded else 0,
        "a teacher's head": max(away, default=0),
    }
