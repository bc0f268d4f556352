"""A training step on a cluster, on paper: seconds of each phase, memory and bytes of each pool.

A phase takes as long as its operations at the rate of its GPUs, or as long as it takes to read its
bytes, whichever is more. Collectives of the trainers are hidden behind their products as far as
these last. Rates are those of the data sheets times `EFFICIENCY`, which is an assumption until
`python -m benchmarks gpu` has run on the GPU in question.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from practicum.costs.amounts import format_bytes
from practicum.costs.collectives import (
    FLOAT_BYTES,
    HALF_BYTES,
    count_collective_bytes,
    count_summed_bytes,
)
from practicum.costs.footprint import Line
from practicum.costs.shape import ModelDims, TrainableDims
from practicum.errors import ResourceError

Phase = Literal["sample", "score", "update"]


STATE_BYTES = 16
"""Bytes of a trained weight: float32 weight, gradient, and AdamW's two moments."""

ANSWER_BYTES = 16
"""Bytes of a sampled token: its id, and its log-probability by the sampler and by the policy."""

USABLE = 0.9
"""The share of a GPU's memory that a plan fills; the rest is its context and what is not planned."""

MAX_PASS_TOKENS = 32768
"""More tokens in a pass than this are no faster."""

DECODE_STEP_SECONDS = 0.012
"""A decode step of an engine is no faster than this, whatever the model."""

HIDDEN_SHARE = 0.9
"""The share of an update behind which collectives hide."""

EFFICIENCY = {"sample": 0.55, "score": 0.4, "update": 0.37}
"""Reached shares of the data sheet: of the bandwidth in decoding, of the operations elsewhere."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: dense bfloat16 operations a second, bytes a second, bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: int


# https://www.nvidia.com/en-us/data-center/: the SXM versions, without sparsity.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312e12, 2.04e12, 80 * 10**9),
        Gpu("h100", 989e12, 3.35e12, 80 * 10**9),
        Gpu("h200", 989e12, 4.8e12, 141 * 10**9),
        Gpu("b200", 2250e12, 8.0e12, 180 * 10**9),
    )
}
"""The GPUs that a plan knows, by name."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many GPUs of one kind in nodes; links in bytes a second and GPU, one way.

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
        """The bytes of one GPU that may be planned."""
        return int(USABLE * self.gpu.memory)


@dataclass(frozen=True, slots=True)
class ScoringWork:
    """The work of one scorer in a step, whose answers are usually hidden states.

    `tokens` are supervised, `flops` those of its body, `forward` the activations of a pass.
    `item_bytes` are those of a weight and of an entry of a hidden state.
    """

    name: str
    dims: ModelDims
    tokens: int
    flops: int
    forward: Line
    item_bytes: int = HALF_BYTES
    sends_hidden: bool = True
    is_student: bool = False
    """True if it scores with weights of the student, so on the samplers' GPUs."""

    def count_bytes(self, longest: int) -> int:
        """Return the bytes of a GPU that holds it and scores a text of the longest length."""
        return self.item_bytes * self.dims.parameters + self.forward.compute_bytes(longest)

    @property
    def sent_bytes(self) -> int:
        """The bytes that it sends to the trainers: hidden states, or a number a token."""
        token_bytes = self.item_bytes * self.dims.width if self.sends_hidden else FLOAT_BYTES
        return token_bytes * self.tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a step, whatever it runs on.

    `contexts` is the sum of the context lengths of all sampled tokens, `longest` the tokens of the
    longest text with its prompt, `texts` the number of texts that it trains on, `update_tokens`
    their tokens, `graph` the memory of a pass through them with recomputed layers, and
    `logit_bytes` that of the logits.
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

    @property
    def teachers(self) -> tuple[ScoringWork, ...]:
        """The scorers with weights of their own."""
        return tuple(scorer for scorer in self.scorers if not scorer.is_student)


@dataclass(frozen=True, slots=True)
class Split:
    """The GPUs of each pool, as the backend `ray` takes them; `teachers` are those of each one."""

    trainers: int
    samplers: int
    teachers: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step by one split: seconds of each phase, bytes a GPU of each pool, bytes of each link.

    `shards` are the trainers that hold one copy of the student together. `send` are the teachers'
    hidden states on their way, `wait` the collectives that no product hides, `copy` what learns on
    its way to the samplers.
    """

    split: Split
    shards: int
    seconds: dict[str, float]
    memory: dict[str, int]
    links: dict[str, int]
    step_seconds: float
    tokens_per_second: float


def choose_split(work: Workload, cluster: Cluster, *, ahead: bool) -> list[Forecast]:
    """Return the forecasts of all splits that fit, the fastest first.

    `ahead` tells whether rollouts of the next step are sampled during the update. Raises
    ResourceError if no split fits, with what is too large and what to do instead.
    """
    pools = 2 + len(work.teachers)
    if cluster.gpus < pools:
        raise ResourceError(
            f"{cluster.gpus} GPUs are too few for {pools} pools: trainers, samplers, and each "
            "teacher; run in one process, without backend and with teacher.residency: swap"
        )
    forecasts, refusals = [], []
    for split in _list_splits(work, cluster):
        try:
            forecasts.append(forecast_step(work, cluster, split, ahead=ahead))
        except ResourceError as error:
            refusals.append((split.trainers, error))
    if not forecasts:
        # The most trainers say best what is missing, unless another pool is what does not fit.
        raise max(refusals, key=lambda refusal: refusal[0])[1]
    # Of equally fast ones, the one that leaves the least to wait for.
    return sorted(
        forecasts, key=lambda forecast: (forecast.step_seconds, sum(forecast.seconds.values()))
    )


def forecast_step(work: Workload, cluster: Cluster, split: Split, *, ahead: bool) -> Forecast:
    """Return the forecast of a step by this split; ResourceError if a pool's memory is too small."""
    # What each process holds whole is judged first: no other split changes it.
    scoring = _time_scoring(work, cluster, split.teachers)
    slots = _count_slots(work, cluster, split)
    shards = _choose_shards(work, cluster, split)
    pass_tokens = _choose_pass_tokens(work, cluster, split, shards)
    update, collectives = _time_update(work, cluster, split, shards, pass_tokens)
    student_flops = sum(scorer.flops for scorer in work.scorers if scorer.is_student)
    sent = sum(scorer.sent_bytes for scorer in work.teachers)
    copied = _count_copied_bytes(work)
    seconds = {
        "sample": _time_decoding(work, cluster, split, slots),
        # The samplers score for a teacher with the student's weights.
        "score": scoring
        + student_flops / (cluster.gpu.flops * split.samplers * EFFICIENCY["score"]),
        "send": sent / (cluster.network_link * min(split.teachers or 1, split.trainers)),
        "update": update,
        "wait": max(collectives - HIDDEN_SHARE * update, 0.0),
        "copy": copied / cluster.network_link,
    }
    # Pools that wait for each other are idle most of the time: the phases then add up.
    total = sum(seconds.values())
    if ahead:
        learning = seconds["update"] + seconds["wait"]
        slowest = max(seconds["sample"], seconds["score"] + seconds["send"], learning)
        total = slowest + seconds["copy"]
    tokens = max(work.sampled_tokens, *(scorer.tokens for scorer in work.scorers), 1)
    memory = {
        "trainer": _count_trainer_bytes(work, cluster, split, shards, pass_tokens),
        "sampler": _count_sampler_bytes(work, slots),
        "teacher": max((teacher.count_bytes(work.longest) for teacher in work.teachers), default=0),
    }
    links = {
        "answers to the driver": ANSWER_BYTES * work.sampled_tokens,
        "hidden states to trainers": sent,
        "weights to samplers": copied * split.samplers,
        "heads to trainers": split.trainers * _count_head_bytes(work),
        "between trainers": count_collective_bytes(
            work.student,
            work.learning,
            split.trainers,
            shards,
            count_passes(work, split, pass_tokens),
        ),
    }
    return Forecast(split, shards, seconds, memory, links, total, tokens / total)


def scale_workload(work: Workload, factor: float) -> Workload:
    """Return the work of a step with `factor` times as many prompts of the same lengths."""

    def scale(amount: int) -> int:
        return max(round(amount * factor), 1) if amount else 0

    scorers = tuple(
        replace(scorer, tokens=scale(scorer.tokens), flops=scale(scorer.flops))
        for scorer in work.scorers
    )
    return replace(
        work,
        completions=scale(work.completions),
        sampled_tokens=scale(work.sampled_tokens),
        contexts=scale(work.contexts),
        sample_flops=scale(work.sample_flops),
        texts=scale(work.texts),
        update_tokens=scale(work.update_tokens),
        update_flops=scale(work.update_flops),
        scorers=scorers,
    )


def count_site_bytes(work: Workload, top_k: int = 64) -> dict[str, int]:
    """Return the bytes of a step that would cross between two sites, by what is put elsewhere."""
    tokens = sum(scorer.tokens for scorer in work.teachers)
    return {
        "samplers: tokens and log-probabilities": ANSWER_BYTES * work.sampled_tokens,
        "samplers: weights": _count_copied_bytes(work),
        "teachers: sampled tokens": FLOAT_BYTES * tokens,
        f"teachers: top {top_k}": 6 * top_k * tokens,
        "teachers: hidden states": sum(scorer.sent_bytes for scorer in work.teachers),
        "half of the trainers: gradients": FLOAT_BYTES * work.learning.parameters,
    }


def _list_splits(work: Workload, cluster: Cluster) -> Iterator[Split]:
    """Yield the pools, in steps of a thirty-second of the cluster.

    More trainers than a node has are whole nodes, so that each copy of the weights is.
    """
    count, teachers = cluster.gpus, len(work.teachers)
    # The time changes little between neighbours, and all splits of 1,024 GPUs are half a million.
    grain = max(count // 32, 1)
    for trainers in range(grain, count, grain):
        if trainers > cluster.per_node and trainers % cluster.per_node:
            continue
        if not teachers:
            yield Split(trainers, count - trainers, 0)
            continue
        for teacher_gpus in range(max(grain // teachers, 1), count, grain):
            samplers = count - trainers - teacher_gpus * teachers
            if samplers > 0:
                yield Split(trainers, samplers, teacher_gpus)


def _choose_shards(work: Workload, cluster: Cluster, split: Split) -> int:
    """Return the ranks that share one copy of the weights: as few nodes as hold it."""
    if split.trainers <= cluster.per_node:
        return split.trainers
    nodes = split.trainers // cluster.per_node
    for count in range(1, nodes):
        shards = count * cluster.per_node
        fixed = _count_trainer_bytes(work, cluster, split, shards, work.longest)
        if nodes % count == 0 and fixed <= cluster.usable_memory:
            return shards
    return split.trainers


def _choose_pass_tokens(work: Workload, cluster: Cluster, split: Split, shards: int) -> int:
    """Return the tokens of a pass of the update; ResourceError if not one text fits."""
    least = _count_trainer_bytes(work, cluster, split, shards, work.longest)
    if least > cluster.usable_memory:
        graph = work.graph.compute_bytes(work.longest)
        state = least - graph
        if state > cluster.usable_memory:
            raise ResourceError(
                f"the student takes {format_bytes(state)} on each of {split.trainers} trainers, "
                f"and a {cluster.gpu.name} has {format_bytes(cluster.usable_memory)} to plan with; "
                "take more GPUs, or adapters: student.lora={rank: 16, alpha: 32}"
            )
        raise ResourceError(
            f"a text of {work.longest:,} tokens takes {format_bytes(graph)} in an update beside "
            f"{format_bytes(state)} of weights, and a {cluster.gpu.name} has "
            f"{format_bytes(cluster.usable_memory)} to plan with: no text is split over GPUs; "
            "lower rollout.max_new_tokens, or take more GPUs so that each holds less of the weights"
        )
    free = cluster.usable_memory - least
    more = free // max(work.graph.each, 1)
    return min(work.longest + more, max(MAX_PASS_TOKENS, work.longest))


def _count_trainer_bytes(
    work: Workload, cluster: Cluster, split: Split, shards: int, pass_tokens: int
) -> int:
    """Return the bytes of one trainer's GPU while it computes a pass of so many tokens."""
    student, learning = work.student, work.learning
    frozen = student.parameters - learning.parameters
    state_bytes = (STATE_BYTES * learning.parameters + HALF_BYTES * frozen) // shards
    # Two gathered layers, the second on its way while the first computes, and one's gradient.
    layer = student.body // max(student.layers, 1)
    layer_bytes = 2 * HALF_BYTES * layer + (FLOAT_BYTES * layer if learning.body else 0)
    heads = _count_head_bytes(work)
    heads += (HALF_BYTES + FLOAT_BYTES * learning.head) * student.head
    passes = work.graph.compute_bytes(pass_tokens)
    return state_bytes + layer_bytes + heads + passes + work.logit_bytes


def _count_head_bytes(work: Workload) -> int:
    """Return the bytes of the heads that read the teachers' hidden states, on each trainer."""
    senders = (teacher for teacher in work.teachers if teacher.sends_hidden)
    return sum(teacher.item_bytes * teacher.dims.head for teacher in senders)


def _count_slots(work: Workload, cluster: Cluster, split: Split) -> int:
    """Return the completions at once on a sampler; ResourceError if not one longest text fits."""
    # Keys and values are paged, so that completions take their mean length, half of what they may
    # become; only one must fit at its longest.
    weights = HALF_BYTES * work.student.parameters
    longest = work.student.count_kv_bytes(work.longest, HALF_BYTES)
    room = cluster.usable_memory - weights
    if room < longest:
        raise ResourceError(
            f"the student and one text of {work.longest:,} tokens take "
            f"{format_bytes(weights + longest)} while it samples, and a {cluster.gpu.name} has "
            f"{format_bytes(cluster.usable_memory)} to plan with: each sampler holds the whole "
            "student; take larger GPUs, or lower rollout.max_new_tokens"
        )
    wanted_rows = math.ceil(work.completions / split.samplers)
    return max(min(room // _count_completion_bytes(work), wanted_rows), 1)


def _count_completion_bytes(work: Workload) -> int:
    """Return the bytes of keys and values of a completion of the mean context length."""
    mean_context = max(work.contexts // max(work.sampled_tokens, 1), 1)
    return work.student.count_kv_bytes(mean_context, HALF_BYTES)


def _count_sampler_bytes(work: Workload, slots: int) -> int:
    """Return the bytes of a sampler's GPU."""
    longest = work.student.count_kv_bytes(work.longest, HALF_BYTES)
    completions = max(slots * _count_completion_bytes(work), longest)
    return HALF_BYTES * work.student.parameters + completions


def _time_decoding(work: Workload, cluster: Cluster, split: Split, slots: int) -> float:
    """Return the seconds until the last completion is sampled."""
    if not work.completions:
        return 0.0
    share = 1 / split.samplers
    steps = max(work.longest_answer, math.ceil(work.sampled_tokens * share / slots))
    read_bytes = steps * HALF_BYTES * (work.student.body + work.student.head)
    read_bytes += work.student.count_kv_bytes(work.contexts, HALF_BYTES) * share
    by_bytes = read_bytes / (cluster.gpu.bandwidth * EFFICIENCY["sample"])
    by_flops = work.sample_flops * share / (cluster.gpu.flops * EFFICIENCY["sample"])
    return max(by_bytes, by_flops, steps * DECODE_STEP_SECONDS)


def _time_scoring(work: Workload, cluster: Cluster, gpus: int) -> float:
    """Return the seconds of the slowest teacher; ResourceError if one does not fit on a GPU."""
    for teacher in work.teachers:
        needed = teacher.count_bytes(work.longest)
        if needed > cluster.usable_memory:
            raise ResourceError(
                f"{teacher.name} takes {format_bytes(needed)} on its GPU, and a {cluster.gpu.name} "
                f"has {format_bytes(cluster.usable_memory)} to plan with: a teacher is not divided "
                "among GPUs; serve it elsewhere and write "
                "teacher={type: openai_api, url: http://HOST:PORT/v1}, or take larger GPUs"
            )
    rate = cluster.gpu.flops * gpus * EFFICIENCY["score"]
    return max((teacher.flops / rate for teacher in work.teachers), default=0.0)


def _time_update(
    work: Workload, cluster: Cluster, split: Split, shards: int, pass_tokens: int
) -> tuple[float, float]:
    """Return the seconds of the update's products, and those of its collectives."""
    # A text is never split, so more trainers than texts have nothing to do.
    busy = min(split.trainers, max(work.texts, 1))
    update = work.update_flops / (cluster.gpu.flops * busy * EFFICIENCY["update"])
    # A ring over several nodes is as fast as its slowest link.
    link = cluster.node_link if shards <= cluster.per_node else cluster.network_link
    passes = count_passes(work, split, pass_tokens)
    total = count_collective_bytes(work.student, work.learning, split.trainers, shards, passes)
    copies = split.trainers // shards
    summed = count_summed_bytes(work.student, work.learning, passes)
    # Copies on other nodes are summed over the network, everything else within.
    between = 2 * summed * (copies - 1)
    collectives = (total - between) / split.trainers / link
    collectives += between / split.trainers / cluster.network_link
    return update, collectives


def count_passes(work: Workload, split: Split, pass_tokens: int) -> int:
    """Return the passes of each trainer in an update: as many on all, since they gather together."""
    return max(math.ceil(work.update_tokens / split.trainers / pass_tokens), 1)


def _count_copied_bytes(work: Workload) -> int:
    """Return the bytes of a copy of what learns, as each sampler gets it after a step."""
    return FLOAT_BYTES * work.learning.parameters
