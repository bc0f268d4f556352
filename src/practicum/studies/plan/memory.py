"""Peak memory by phase: what is alive when, item by item, as the local backend holds it."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from practicum.costs.segments import how_many_fit, packed_tokens
from practicum.errors import ResourceError
from practicum.objective import Objective, can_fuse
from practicum.objective.passes import rows_of_passes, texts_of
from practicum.ports.paper import PaperRecord
from practicum.studies.plan.paper import DryRun
from practicum.types import ScoreRequest

FLOAT = 4
MIB = 2**20

LIBRARIES = 96 * MIB
"""Tokenizers, what libraries load when first used, and what the allocator keeps; measured: see `python -m benchmarks plan`."""

ADAPTERS_GAPS = 2
"""With adapters the allocator takes so many times what the graph holds: their small tensors keep the room between the large
ones from being used again. Measured on SmolLM2-135M on a processor (`python -m benchmarks plan --cases adapters`)."""

DRAWING_TILES = 4
"""Matrices of [rows, V] that drawing holds: logits, their exponentials, sums in float64."""

COMPARED, COMPARED_TILES = 256, 5
"""Tokens whose distributions an evaluation compares at once, and how many matrices that takes."""

FUSED_TILES, TOKEN_TILES, AUTOGRAD_TILES = 6, 4, 12
"""Matrices of [chunk_tokens, V] of the logit side: fused with a teacher's distribution, with its sampled tokens alone,
and by autograd."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each item in each phase; a phase takes the sum of its items, a run what its largest phase takes."""

    phases: Mapping[str, Mapping[str, int]]

    def of(self, phase: str) -> int:
        """The bytes of a phase."""
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
    """What each phase of a step takes once the optimizer has its moments; `process` is what Python and its libraries take."""
    recipe, record = run.recipe, run.record
    float_student = FLOAT if recipe.student.dtype == "float32" else 2
    moving = FLOAT * run.record.learning.parameters
    vocabulary = run.record.shape.vocabulary
    always = {
        "Python and libraries": process + LIBRARIES,
        "student": float_student * (run.record.shape.parameters - run.record.learning.parameters)
        + moving,
        "teachers": sum(
            _bytes(run, name)
            for name, scorer in run.record.scorers.items()
            if not _on_disk(run, name)
        ),
        "self-teachers' copies": FLOAT * sum(scorer.held for scorer in run.record.scorers.values()),
        "moments of AdamW": 2 * moving,
        "logit side": tiles(recipe.objective) * record.chunk_tokens * vocabulary * FLOAT,
    }
    asked = {"teacher": recipe.objective.signal, "reference": recipe.objective.reference_signal}
    hidden = 0
    for name, requests in record.scored.items():
        signal = asked.get(name.partition("/")[0])
        if name in run.record.scorers and signal is not None and signal.type != "sampled":
            hidden += (
                FLOAT
                * run.record.scorers[name].shape.width
                * sum(len(request.tokens) for request in requests)
            )
    visiting = max(
        (_bytes(run, name) for name in run.record.scorers if _on_disk(run, name)), default=0
    )
    lag = recipe.rollout.max_staleness
    if lag:
        always["copies of what learns, for rollouts ahead"] = (lag + 1) * moving
        always["hidden states of steps ahead"] = lag * hidden
    phases = {
        "sample": {
            **always,
            **_sampling(run, len(record.drawn.get("student", ())), recipe.rollout.max_new_tokens),
        },
        "score": {
            **always,
            "a visiting teacher": visiting,
            "activations": _scoring(run),
            "hidden states": hidden,
        },
        "update": {**always, "gradients": moving, "hidden states": hidden, **_updating(run)},
        "save": {**always, "files being written": 2 * moving},
    }
    if lag:
        phases["update"] = {
            **phases["sample"],
            **phases["score"],
            **phases["update"],
        }  # the three overlap
    if recipe.evaluation.prompts:
        length = recipe.evaluation.max_new_tokens or recipe.rollout.max_new_tokens
        drawing = _sampling(run, recipe.evaluation.prompts * recipe.evaluation.samples, length)
        compared = {"compared distributions": COMPARED * vocabulary * FLOAT * COMPARED_TILES}
        phases["evaluate"] = {
            **always,
            **max(drawing, compared, key=lambda items: sum(items.values())),
        }
    return Memory(
        {
            phase: {name: size for name, size in items.items() if size}
            for phase, items in phases.items()
        }
    )


def tiles(objective: Objective) -> int:
    """How many matrices of [chunk_tokens, V] the logit side of an objective holds."""
    if not can_fuse(objective):
        return AUTOGRAD_TILES
    slopes = max(len(objective.losses) - 1, 0)
    asks = objective.signal is not None and objective.signal.type == "full"
    return (FUSED_TILES + slopes) if asks else TOKEN_TILES


def estimate_fragmentation(run: DryRun) -> int:
    """How many times what its graph holds an update takes."""
    return ADAPTERS_GAPS if run.record.learning.adapters else 1


def update_tokens(run: DryRun) -> int:
    """The most tokens that go through the student together in the update."""
    data = run.record.data
    passes = [rows[0] for rows in rows_of_passes(data, run.graph.tokens, run.record.packs_up_to)]
    return max(
        (packed_tokens(texts_of([data[row].rollout for row in rows])) for rows in passes), default=0
    )


def memory_limit(device: str) -> int:
    """What there is: free memory of the GPU, or the machine's memory, or less where the process's group may use less."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    text = group.read_text().strip() if group.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine


@cache
def own_bytes() -> int:
    """The resident memory of this process when it was first asked; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    return next(
        int(line.split()[1]) * 1024
        for line in status.read_text().splitlines()
        if line.startswith("VmRSS")
    )


def parse_bytes(text: str) -> int:
    """`8GiB`, `512 MiB`, `16GB` or a number of bytes; ResourceError where it is none of them."""
    units = {
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "b": 1,
        "": 1,
    }
    number = text.strip().lower().rstrip("kmgib ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise ResourceError(
            f"--memory {text!r} is no amount of memory; write for example 8GiB or 512MiB"
        )
    return size


def _bytes(run: DryRun, name: str) -> int:
    """The weights of a scorer that has its own."""
    scorer = run.record.scorers[name]
    if scorer.config is None:
        return 0
    return scorer.shape.parameters * (FLOAT if scorer.config.dtype == "float32" else 2)


def _on_disk(run: DryRun, name: str) -> bool:
    config = run.record.scorers[name].config
    return config is not None and config.residency == "disk"


def _sampling(run: DryRun, texts: int, new_tokens: int) -> dict[str, int]:
    """Decoding: weights laid out anew, a store of keys and values that is made once, and the logits of a step."""
    rows = min(run.record.sampling_batch, texts)
    longest = max(map(len, run.prompts), default=0) + new_tokens
    plain = run.recipe.student.dtype == "float32" and platform.machine().lower() in (
        "x86_64",
        "amd64",
    )
    prepared = (
        plain
        and rows
        and new_tokens >= run.record.prepares_weights_from
        and torch.backends.mkldnn.is_available()
    )
    return {
        "weights laid out for decoding": FLOAT * (run.record.shape.body + run.record.shape.head)
        if prepared
        else 0,
        "keys and values": run.record.shape.kv_bytes(rows * longest, FLOAT),
        "logits": rows * run.record.shape.vocabulary * FLOAT * DRAWING_TILES,
    }


def _scoring(run: DryRun) -> int:
    """The largest pass of any scorer."""
    return max(
        (
            run.record.scorers[name].body.forward.at(_largest_pass(requests, run.record))
            for name, requests in run.record.scored.items()
            if name in run.record.scorers and requests
        ),
        default=0,
    )


def _largest_pass(requests: Sequence[ScoreRequest], record: PaperRecord) -> int:
    largest = 0
    while requests:
        count = how_many_fit(requests, record.scored_tokens, record.packs_up_to)
        largest = max(largest, packed_tokens(requests[:count]))
        requests = requests[count:]
    return largest


def _updating(run: DryRun) -> dict[str, int]:
    """The graph of the largest pass, or the embedding's second gradient, whichever is more; the head laid out anew."""
    tokens = update_tokens(run)
    learned = sum(int(datum.rollout.loss_mask.sum()) for datum in run.record.data)
    embedding = FLOAT * run.record.shape.head if run.record.learning.head else 0
    return {
        "graph and its gradients": max(
            estimate_fragmentation(run) * run.body.update.at(tokens), embedding
        ),
        "head laid out for products": FLOAT * run.record.shape.head
        if learned >= run.record.prepares_head_from
        else 0,
    }
