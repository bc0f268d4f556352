"""A forecast of a training step on a cluster: seconds of each phase, memory and bytes of each pool.

The time of a phase is the larger of two times: its operations at the rate of its GPUs, and reading
its bytes. Collectives of the trainers overlap with their matrix products where possible. Rates come
from the data sheets, by the models' dtypes, times `EFFICIENCY`, which is an assumption until
`python -m benchmarks gpu` has run on the GPU in question.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from practicum.costs.amounts import format_bytes
from practicum.costs.collectives import count_collective_bytes, count_summed_bytes
from practicum.costs.workload import (
    FLOAT_BYTES,
    HALF_BYTES,
    Cluster,
    ScoringWork,
    Split,
    Workload,
)
from practicum.errors import ResourceError

Phase = Literal["sample", "score", "update"]

STATE_BYTES = 16
"""Bytes of a trained weight: float32 weight, gradient, and AdamW's two moments."""

ANSWER_BYTES = 16
"""Bytes of a sampled token: its id, and its log-probability by the sampler and by the policy."""

MAX_PASS_TOKENS = 32768
"""The number of tokens per pass above which a pass gets no faster per token."""

DECODE_STEP_SECONDS = 0.012
"""The shortest time of a decode step of an engine, for any model."""

HIDDEN_SHARE = 0.9
"""The share of an update's time that can overlap with collectives."""

TOLERANCE = 1.03
"""The time of a split with fewer GPUs that is still preferred, as a factor of the fastest time."""

EFFICIENCY = {"sample": 0.55, "score": 0.4, "update": 0.37}
"""Achieved fractions of the data sheet: of the bandwidth in decoding, of the operations elsewhere."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a step under one split: seconds of each phase, bytes per GPU of each pool,
    bytes of each link.

    `shards` trainers together hold one copy of the student. `send` is the transfer of the teachers'
    hidden states, `wait` the collectives that do not overlap with computation, `copy` the transfer
    of trained weights to the samplers. `busy` is the share of the step in which a pool works.
    """

    split: Split
    shards: int
    seconds: dict[str, float]
    memory: dict[str, int]
    links: dict[str, int]
    step_seconds: float
    tokens_per_second: float
    busy: dict[str, float]


def choose_split(work: Workload, cluster: Cluster, *, ahead: bool) -> list[Forecast]:
    """Return the forecasts of all splits that fit, the fastest first.

    `ahead` tells whether rollouts of the next step are sampled during the update. Raises
    ResourceError if no split fits; the message names the part that is too large and a remedy.
    """
    if cluster.gpus - len(work.learners) < 2:
        raise ResourceError(
            f"{cluster.gpus} GPU{'s are' if cluster.gpus > 1 else ' is'} too few for trainers and "
            f"samplers{' next to scorers that learn' if work.learners else ''}; run in one process, "
            "without backend and with teacher.residency: swap"
        )
    forecasts, refusals = [], []
    for split in _list_splits(work, cluster):
        try:
            forecasts.append(forecast_step(work, cluster, split, ahead=ahead))
        except ResourceError as error:
            refusals.append(((split.teachers != "beside", split.trainers), error))
    if not forecasts:
        # The split with the most trainers has the most useful message, unless another pool does not
        # fit.
        raise max(refusals, key=lambda refusal: refusal[0])[1]
    # Among equally fast splits, the split with the shortest total of all phases comes first.
    return sorted(
        forecasts, key=lambda forecast: (forecast.step_seconds, sum(forecast.seconds.values()))
    )


def find_smallest(work: Workload, cluster: Cluster, seconds: float, *, ahead: bool) -> Forecast:
    """Return the forecast of the fewest GPUs that takes at most `TOLERANCE` of the fastest time."""

    def choose(gpus: int) -> Forecast:
        part = replace(cluster, gpus=gpus, per_node=min(gpus, cluster.per_node))
        return choose_split(work, part, ahead=ahead)[0]

    def is_fast(gpus: int) -> bool:
        try:
            return choose(gpus).step_seconds <= TOLERANCE * seconds
        except ResourceError:
            return False  # it does not fit on so few

    return choose(1 + bisect_left(range(1, cluster.gpus), True, key=is_fast))


def count_gpus(work: Workload, split: Split) -> int:
    """Return the GPUs of all pools of a split."""
    return split.trainers + split.samplers + split.teacher_gpus * len(work.teachers)


def forecast_step(work: Workload, cluster: Cluster, split: Split, *, ahead: bool) -> Forecast:
    """Return the forecast of a step by this split; ResourceError if a pool's memory is too small."""
    # Parts that each process must hold in full are checked first: no other split changes them.
    slots = _count_slots(work, cluster, split)
    shards = _choose_shards(work, cluster, split)
    scoring = _time_scoring(work, cluster, split, shards)
    pass_tokens = _choose_pass_tokens(work, cluster, split, shards)
    update, collectives = _time_update(work, cluster, split, shards, pass_tokens)
    student_flops = sum(scorer.flops for scorer in work.scorers if scorer.is_student)
    sent = sum(scorer.sent_bytes for scorer in work.teachers)
    copied = _count_copied_bytes(work)
    teachers = work.teachers if split.teacher_gpus else ()
    seconds = {
        "sample": _time_decoding(work, cluster, split, slots),
        # The samplers score for a teacher with the student's weights.
        "score": scoring
        + student_flops
        / (cluster.gpu.get_flops(work.item_bytes) * split.samplers * EFFICIENCY["score"]),
        "send": sent
        / (cluster.network_link * min(split.teacher_gpus or split.trainers, split.trainers)),
        "update": update,
        "wait": max(collectives - HIDDEN_SHARE * update, 0.0),
        "copy": copied / cluster.network_link,
    }
    if work.learners:
        seconds["judge"] = _time_judging(work, cluster)
    # If the pools wait for each other, the phases add up.
    total = sum(seconds.values())
    if ahead:
        learning = seconds["update"] + seconds["wait"] + seconds.get("judge", 0.0)
        scored = seconds["score"] + seconds["send"]
        # A teacher in the trainers' processes scores before they train.
        chain = scored + learning if split.teachers == "beside" else max(scored, learning)
        slowest = max(seconds["sample"], chain)
        total = slowest + seconds["copy"]
    tokens = max(work.sampled_tokens, *(scorer.tokens for scorer in work.scorers), 1)
    memory = {
        "trainer": _count_trainer_bytes(work, cluster, split, shards, pass_tokens),
        "sampler": _count_sampler_bytes(work, slots),
        "teacher": max(
            (t.count_bytes(work.longest, split.teacher_shards) for t in teachers), default=0
        ),
    }
    if work.learners:
        memory["judge"] = max(learner.num_bytes for learner in work.learners)
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
            work.item_bytes,
        ),
        "between a teacher's shards": _count_teacher_gathers(work, split, shards),
    }
    # Trainers beyond the number of texts only take part in collectives.
    share = min(max(work.texts, 1) / split.trainers, 1.0)
    busy = {name: 0.0 for name, size in memory.items() if size}
    busy["trainer"] += (seconds["update"] * share + seconds["wait"]) / total
    busy["sampler"] += seconds["sample"] / total
    scores = "teacher" if teachers else "trainer" if work.teachers else "sampler"
    busy[scores] += seconds["score"] / total
    if work.learners:
        busy["judge"] += seconds["judge"] / total
    return Forecast(split, shards, seconds, memory, links, total, tokens / total, busy)


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
        learners=tuple(replace(learner, flops=scale(learner.flops)) for learner in work.learners),
    )


def count_site_bytes(work: Workload, top_k: int = 64) -> dict[str, int]:
    """Return a step's bytes that would cross between two sites, per part that could be remote."""
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

    Trainers beyond one node use whole nodes, so that each copy of the weights does too.
    """
    # Scorers that learn have a GPU each.
    count, teachers = cluster.gpus - len(work.learners), len(work.teachers)
    # The time changes little between adjacent splits, and 1,024 GPUs have half a million splits.
    grain = max(count // 32, 1)
    for trainers in range(grain, count, grain):
        if trainers > cluster.per_node and trainers % cluster.per_node:
            continue
        yield Split(trainers, count - trainers, "beside" if teachers else 0)
        if not teachers:
            continue
        for teacher_gpus in range(max(grain // teachers, 1), count, grain):
            samplers = count - trainers - teacher_gpus * teachers
            if samplers > 0:
                shards = _choose_teacher_shards(work, cluster, teacher_gpus)
                yield Split(trainers, samplers, teacher_gpus, shards)


def _choose_teacher_shards(work: Workload, cluster: Cluster, gpus: int) -> int:
    """Return the fewest GPUs that can hold a copy of each teacher; all GPUs if no number is enough."""
    for shards in range(1, gpus):
        largest = max(teacher.count_bytes(work.longest, shards) for teacher in work.teachers)
        if gpus % shards == 0 and largest <= cluster.usable_memory:
            return shards
    return gpus


def _choose_shards(work: Workload, cluster: Cluster, split: Split) -> int:
    """Return the number of ranks that share one copy of the weights, on as few nodes as possible."""
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
    """Return the tokens of a pass of the update; ResourceError if one text does not fit."""
    least = _count_trainer_bytes(work, cluster, split, shards, work.longest)
    if least > cluster.usable_memory:
        graph = work.graph.compute_bytes(work.longest)
        state = least - graph
        if state > cluster.usable_memory:
            raise ResourceError(
                f"the student{_name_company(work, split)} takes {format_bytes(state)} on each of "
                f"{split.trainers} trainers, "
                f"and a {cluster.gpu.name} has {format_bytes(cluster.usable_memory)} to plan with; "
                "take more GPUs, or adapters: student.lora={rank: 16, alpha: 32}"
            )
        raise ResourceError(
            f"a text of {work.longest:,} tokens takes {format_bytes(graph)} in an update next to "
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
    """Return the bytes of one trainer's GPU while it computes a pass of `pass_tokens` tokens."""
    student, learning = work.student, work.learning
    frozen = student.parameters - learning.parameters
    state_bytes = (STATE_BYTES * learning.parameters + work.item_bytes * frozen) // shards
    # Two gathered layers, because the second is fetched while the first computes, and the gradient
    # of one layer.
    layer = student.body // max(student.layers, 1)
    layer_bytes = 2 * work.item_bytes * layer + (FLOAT_BYTES * layer if learning.body else 0)
    heads = _count_head_bytes(work)
    heads += (work.item_bytes + FLOAT_BYTES * learning.head) * student.head
    passes = work.graph.compute_bytes(pass_tokens)
    update_bytes = layer_bytes + heads + passes + work.logit_bytes
    if split.teachers != "beside":
        return state_bytes + update_bytes
    # Teachers in the trainers' processes keep their shards there, and score before the update.
    state_bytes += sum(teacher.count_shard_bytes(shards) for teacher in work.teachers)
    scoring = [teacher.count_pass_bytes(work.longest, shards) for teacher in work.teachers]
    return state_bytes + max(update_bytes, *scoring, 0)


def _count_head_bytes(work: Workload) -> int:
    """Return the bytes of the heads that read the teachers' hidden states, on each trainer."""
    senders = (teacher for teacher in work.teachers if teacher.sends_hidden)
    return sum(teacher.item_bytes * teacher.dims.head for teacher in senders)


def _count_slots(work: Workload, cluster: Cluster, split: Split) -> int:
    """Return a sampler's concurrent completions; ResourceError if one longest text does not fit."""
    # Keys and values are paged, so completions take their mean length, half of the maximum; only
    # one completion must fit at full length.
    weights = count_sampler_weights(work)
    longest = work.student.count_kv_bytes(work.longest, work.item_bytes)
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


def count_sampler_weights(work: Workload) -> int:
    """Return the bytes of the student's weights on a sampler: 8 per weight if all of them learn.

    Trained weights are kept in float32, and their matrices are rounded once if the student
    multiplies in bfloat16. The decode step packs a copy of the layers' matrices in this dtype.
    Measured as 4, 2 and 2 bytes per weight of a student in bfloat16.
    """
    student, learning = work.student, work.learning
    frozen = student.parameters - learning.parameters
    learned_maps = learning.body + (student.head if learning.head else 0)
    rounded = HALF_BYTES * learned_maps if work.item_bytes == HALF_BYTES else 0
    unrounded = FLOAT_BYTES * learning.parameters + work.item_bytes * frozen
    return unrounded + rounded + work.item_bytes * student.body


def _count_completion_bytes(work: Workload) -> int:
    """Return the bytes of keys and values of a completion of the mean context length."""
    mean_context = max(work.contexts // max(work.sampled_tokens, 1), 1)
    return work.student.count_kv_bytes(mean_context, work.item_bytes)


def _count_sampler_bytes(work: Workload, slots: int) -> int:
    """Return the bytes of a sampler's GPU."""
    longest = work.student.count_kv_bytes(work.longest, work.item_bytes)
    completions = max(slots * _count_completion_bytes(work), longest)
    return count_sampler_weights(work) + completions


def _time_decoding(work: Workload, cluster: Cluster, split: Split, slots: int) -> float:
    """Return the seconds until the last completion is sampled."""
    if not work.completions:
        return 0.0
    share = 1 / split.samplers
    steps = max(work.longest_answer, math.ceil(work.sampled_tokens * share / slots))
    read_bytes = steps * work.item_bytes * (work.student.body + work.student.head)
    read_bytes += work.student.count_kv_bytes(work.contexts, work.item_bytes) * share
    by_bytes = read_bytes / (cluster.gpu.bandwidth * EFFICIENCY["sample"])
    by_flops = (
        work.sample_flops * share / (cluster.gpu.get_flops(work.item_bytes) * EFFICIENCY["sample"])
    )
    return max(by_bytes, by_flops, steps * DECODE_STEP_SECONDS)


def _name_company(work: Workload, split: Split) -> str:
    """Describe the teachers that share the trainers' memory."""
    teachers = work.teachers if split.teachers == "beside" else ()
    beside = [teacher.name for teacher in teachers]
    return f" with {' and '.join(beside)}" if beside else ""


def _time_scoring(work: Workload, cluster: Cluster, split: Split, shards: int) -> float:
    """Return the seconds of scoring; ResourceError if a shard of a teacher does not fit on a GPU."""
    if split.teachers == "beside":
        # In the same processes, so the teachers score one after another.
        times = (_time_teacher(t, cluster, split.trainers, shards) for t in work.teachers)
        return sum(times)
    for teacher in work.teachers:
        needed = teacher.count_bytes(work.longest, split.teacher_shards)
        if needed > cluster.usable_memory:
            raise ResourceError(
                f"{teacher.name} takes {format_bytes(needed)} on each of {split.teacher_shards} "
                f"GPUs that hold it in shards, and a {cluster.gpu.name} has "
                f"{format_bytes(cluster.usable_memory)} to plan with; take more or larger GPUs, or "
                "serve it elsewhere and set teacher={type: openai_api, url: http://HOST:PORT/v1}"
            )
    gpus, count = split.teacher_gpus, split.teacher_shards
    times = (_time_teacher(teacher, cluster, gpus, count) for teacher in work.teachers)
    return max(times, default=0.0)


def _time_judging(work: Workload, cluster: Cluster) -> float:
    """Return the seconds of the scorers that learn; the driver calls them one after another.

    Raises ResourceError if one does not fit on a GPU.
    """
    for learner in work.learners:
        if learner.num_bytes > cluster.usable_memory:
            raise ResourceError(
                f"{learner.name} takes {format_bytes(learner.num_bytes)} on its own GPU, and a "
                f"{cluster.gpu.name} has {format_bytes(cluster.usable_memory)} to plan with: a "
                "scorer that learns is not put in shards; give it a smaller model, or adapters"
            )
    times = (learner.flops / cluster.gpu.get_flops(learner.item_bytes) for learner in work.learners)
    return sum(times) / EFFICIENCY["update"]


def _time_teacher(teacher: ScoringWork, cluster: Cluster, gpus: int, shards: int) -> float:
    """Return the seconds in which `gpus` GPUs score, with gathers not hidden by computation."""
    products = teacher.flops / (
        cluster.gpu.get_flops(teacher.item_bytes) * gpus * EFFICIENCY["score"]
    )
    link = cluster.node_link if shards <= cluster.per_node else cluster.network_link
    gathers = teacher.count_gathered_bytes(gpus, shards) / link
    return products + max(gathers - HIDDEN_SHARE * products, 0.0)


def _count_teacher_gathers(work: Workload, split: Split, shards: int) -> int:
    """Return the bytes that all GPUs receive to gather the teachers' shards."""
    gpus, count = split.teacher_gpus, split.teacher_shards
    if split.teachers == "beside":
        gpus, count = split.trainers, shards
    return sum(gpus * teacher.count_gathered_bytes(gpus, count) for teacher in work.teachers)


def _time_update(
    work: Workload, cluster: Cluster, split: Split, shards: int, pass_tokens: int
) -> tuple[float, float]:
    """Return the seconds of the update's matrix products, and the seconds of its collectives."""
    # A text is never split, so more trainers than texts have nothing to do.
    busy = min(split.trainers, max(work.texts, 1))
    update = work.update_flops / (
        cluster.gpu.get_flops(work.item_bytes) * busy * EFFICIENCY["update"]
    )
    # A ring over several nodes is as fast as its slowest link.
    link = cluster.node_link if shards <= cluster.per_node else cluster.network_link
    passes = count_passes(work, split, pass_tokens)
    total = count_collective_bytes(
        work.student, work.learning, split.trainers, shards, passes, work.item_bytes
    )
    copies = split.trainers // shards
    summed = count_summed_bytes(work.student, work.learning, passes)
    # Gradients of copies on different nodes are summed over the network; everything else stays
    # within a node.
    between = 2 * summed * (copies - 1)
    collectives = (total - between) / split.trainers / link
    collectives += between / split.trainers / cluster.network_link
    return update, collectives


def count_passes(work: Workload, split: Split, pass_tokens: int) -> int:
    """Return the passes of each trainer in an update; all trainers have the same number, because
    they gather together.
    """
    return max(math.ceil(work.update_tokens / split.trainers / pass_tokens), 1)


def _count_copied_bytes(work: Workload) -> int:
    """Return the bytes of the trained weights that each sampler receives after a step."""
    return FLOAT_BYTES * work.learning.parameters
