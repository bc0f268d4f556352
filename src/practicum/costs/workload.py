"""A cluster and a step's work, as data: GPUs and links, each model's work, and the GPU split."""

import math
from dataclasses import dataclass
from typing import Literal

from practicum.costs.footprint import Line
from practicum.costs.shape import ModelDims, TrainableDims

FLOAT_BYTES, HALF_BYTES = 4, 2

USABLE = 0.9
"""The share of GPU memory for plans; the rest is for the CUDA context and unplanned allocations."""

SCORED_TOKENS = 16384
"""The tokens of a teacher's pass on a GPU."""


PCIE_LINK = 25e9
"""80 % of PCIe 4.0 with 16 lanes, in bytes per second and direction."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: dense operations per second in two dtypes, bytes per second, bytes."""

    name: str
    bfloat16_flops: float
    float32_flops: float
    bandwidth: float
    memory: int
    link: float = 360e9
    """Bytes per second to a GPU in the same node, in one direction, at 80 % of the data sheet."""

    @property
    def usable_memory(self) -> int:
        """The bytes that a plan may use."""
        return int(USABLE * self.memory)

    def get_flops(self, item_bytes: int) -> float:
        """Return the operations per second of products, by the bytes of an operand."""
        return self.float32_flops if item_bytes == FLOAT_BYTES else self.bfloat16_flops


# https://www.nvidia.com/en-us/data-center/: the SXM versions, without sparsity. Products in float32
# are planned at the rate of FP32; `dtype: auto` also allows TF32 (h100: 495e12).
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312e12, 19.5e12, 2.04e12, 80 * 10**9),
        Gpu("h100", 989e12, 67e12, 3.35e12, 80 * 10**9),
        Gpu("h200", 989e12, 67e12, 4.8e12, 141 * 10**9),
        Gpu("b200", 2250e12, 75e12, 8.0e12, 180 * 10**9),
        # Cards on PCIe 4.0, and 5.0 for the last one.
        Gpu("rtx3090", 71e12, 35.6e12, 0.936e12, 24 * 10**9, PCIE_LINK),
        Gpu("rtx4090", 165e12, 82.6e12, 1.008e12, 24 * 10**9, PCIE_LINK),
        Gpu("a10g", 70e12, 31.5e12, 0.6e12, 24 * 10**9, PCIE_LINK),
        Gpu("l4", 121e12, 30.3e12, 0.3e12, 24 * 10**9, PCIE_LINK),
        Gpu("l40s", 362e12, 91.6e12, 0.864e12, 48 * 10**9, PCIE_LINK),
        Gpu("rtx5090", 209e12, 105e12, 1.792e12, 32 * 10**9, 2 * PCIE_LINK),
    )
}
"""The GPUs that a plan knows, by name."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical GPUs in nodes; links in bytes per second and GPU, in one direction.

    Links are 80 % of the data sheets: NVLink of the fourth generation within a node, InfiniBand at
    400 Gbit/s between nodes.
    """

    gpus: int
    gpu: Gpu
    per_node: int = 8
    node_link: float = 360e9
    network_link: float = 40e9

    @property
    def usable_memory(self) -> int:
        """The bytes of one GPU that a plan may use."""
        return self.gpu.usable_memory


@dataclass(frozen=True, slots=True)
class ScoringWork:
    """The work of one scorer in a step; its answers are usually hidden states.

    `tokens` counts the supervised tokens, `flops` the operations of its body, `forward` the bytes
    of the activations of a pass. `item_bytes` is the size of a weight and of an entry of a hidden
    state.
    """

    name: str
    dims: ModelDims
    tokens: int
    flops: int
    forward: Line
    item_bytes: int = HALF_BYTES
    sends_hidden: bool = True
    is_student: bool = False
    """True if it scores with the student's weights, and therefore on the samplers' GPUs."""

    def count_bytes(self, longest: int, shards: int = 1) -> int:
        """Return the bytes of a GPU that holds a shard and scores a text of the longest length."""
        return self.count_shard_bytes(shards) + self.count_pass_bytes(longest, shards)

    def count_shard_bytes(self, shards: int) -> int:
        """Return the bytes of its weights on each of `shards` GPUs."""
        return self.item_bytes * self.dims.parameters // shards

    def count_pass_bytes(self, longest: int, shards: int) -> int:
        """Return the bytes of a pass in addition to the weights: activations and gathered weights."""
        # Two layers, because the second is fetched while the first computes, and the head.
        gathered = 2 * self.dims.body // max(self.dims.layers, 1) + self.dims.head
        return self.forward.compute_bytes(longest) + (
            self.item_bytes * gathered if shards > 1 else 0
        )

    def count_gathered_bytes(self, gpus: int, shards: int) -> int:
        """Return the bytes of remote shards that each GPU receives in a step."""
        passes = max(math.ceil(self.tokens / gpus / SCORED_TOKENS), 1)
        return passes * self.item_bytes * self.dims.body * (shards - 1) // shards

    @property
    def sent_bytes(self) -> int:
        """The bytes that it sends to the trainers: hidden states, or one number per token."""
        token_bytes = self.item_bytes * self.dims.width if self.sends_hidden else FLOAT_BYTES
        return token_bytes * self.tokens


@dataclass(frozen=True, slots=True)
class LearningWork:
    """The work of a scorer that learns, on its own GPU.

    `num_bytes` counts its weights, moments and the longest text's graph, `flops` the operations of
    its judgements and updates in a step, `item_bytes` the bytes of an operand of its products.
    """

    name: str
    num_bytes: int
    flops: int
    item_bytes: int = HALF_BYTES


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a step, independent of the hardware.

    `contexts` is the sum of the context lengths of all sampled tokens, `longest` the tokens of the
    longest text with its prompt, `texts` the number of texts that it trains on, `update_tokens`
    their tokens, `graph` the memory of a pass through them with recomputed layers, and
    `logit_bytes` the memory of the logits.
    """

    student: ModelDims
    learning: TrainableDims
    completions: int
    sampled_tokens: int
    longest_answer: int
    longest: int
    contexts: int
    sample_flops: int
    texts: int
    update_tokens: int
    update_flops: int
    graph: Line
    logit_bytes: int
    scorers: tuple[ScoringWork, ...]
    learners: tuple[LearningWork, ...] = ()
    item_bytes: int = HALF_BYTES
    """The bytes of an operand of the student's products, and of its keys and values."""

    @property
    def teachers(self) -> tuple[ScoringWork, ...]:
        """The scorers that do not share the student's weights."""
        return tuple(scorer for scorer in self.scorers if not scorer.is_student)


@dataclass(frozen=True, slots=True)
class Split:
    """The GPUs of each pool, as the backend `ray` takes them.

    `teachers` is the number of GPUs per teacher, 0 without a teacher; with `beside`, the teachers
    run in the trainers' processes, in as many shards as the student. `teacher_shards` GPUs together
    hold one copy of a teacher.
    """

    trainers: int
    samplers: int
    teachers: int | Literal["beside"]
    teacher_shards: int = 1

    @property
    def teacher_gpus(self) -> int:
        """The GPUs that each teacher has for itself."""
        return 0 if self.teachers == "beside" else self.teachers
