"""The bytes that the trainers of a cluster exchange in an update, computed from the sizes of the
student.

As FSDP2 sends them (arXiv 2304.11277): each pass gathers the layers in the student's dtype, once
forward and once backward, and sums their gradients in float32; an embedding that is not tied to the
head is gathered once per pass, the head once per update.
"""

from practicum.costs.shape import ModelDims, TrainableDims
from practicum.costs.workload import FLOAT_BYTES


def count_collective_bytes(
    student: ModelDims,
    learning: TrainableDims,
    trainers: int,
    shards: int,
    passes: int,
    item_bytes: int,
) -> int:
    """Return the bytes that all trainers receive in an update of `passes` passes.

    Each group of `shards` trainers together holds one copy of the student. The few numbers sent per
    token are not counted.
    """
    gradients = count_summed_bytes(student, learning, passes)
    copies = trainers // shards
    gathered = count_gathered_bytes(student, learning, passes, item_bytes)
    within = copies * (gathered + gradients) * (shards - 1)
    # An all-reduce, over copies and over adapters, takes two rounds in a ring.
    between = 2 * (copies - 1) * gradients
    return within + between + 2 * (trainers - 1) * FLOAT_BYTES * learning.adapters


def count_gathered_bytes(
    student: ModelDims, learning: TrainableDims, passes: int, item_bytes: int
) -> int:
    """Return the bytes of the weights that are gathered in an update."""
    # A trainable head stays in float32, and is rounded where it is read.
    head_item = FLOAT_BYTES if learning.head else item_bytes
    is_tied = student.parameters - student.body < 2 * student.head
    embedding = 0 if is_tied else student.head
    layers = student.parameters - student.adapters - student.head - embedding
    return passes * item_bytes * (2 * layers + embedding) + head_item * student.head


def count_summed_bytes(student: ModelDims, learning: TrainableDims, passes: int) -> int:
    """Return the bytes of the gradients that are summed over the shards in an update."""
    head = student.head if learning.head else 0
    layers = learning.parameters - learning.adapters - head
    return FLOAT_BYTES * (passes * layers + head)
