"""The plan of a recipe on a cluster: the work of each GPU, and the time and memory of a step."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from practicum.costs import Line, count_read_tokens
from practicum.costs.cluster import (
    STATE_BYTES,
    Forecast,
    choose_split,
    count_gpus,
    count_site_bytes,
    find_smallest,
    scale_workload,
)
from practicum.costs.workload import (
    GPUS,
    Cluster,
    Gpu,
    LearningWork,
    ScoringWork,
    Workload,
)
from practicum.errors import ResourceError
from practicum.runs.plan.dry_runs import DryRun
from practicum.runs.plan.memory import (
    FLOAT_BYTES,
    count_frozen_bytes,
    count_tiles,
    get_item_bytes,
    sends_hidden,
)

LOGIT_TOKENS = 1024
"""The number of tokens with logits in a GPU's memory at the same time."""

BEST = 3
"""The splits that are printed."""

SITE_GBIT = 1.0
"""The link between two sites, in Gbit/s."""


def parse_cluster(text: str) -> Cluster:
    """Parse `64xh100` or `64xh100/4` (four in a node); ResourceError for anything else."""
    match = re.fullmatch(r"(\d+)x(\w+?)(?:/(\d+))?", text.strip().lower())
    if match is None or match[2] not in GPUS or int(match[1]) < 1 or match[3] == "0":
        raise ResourceError(
            f"--cluster {text!r} is not a number of GPUs of a kind; use for example 64xh100, "
            f"or 64xh100/4 for nodes of 4 (known: {', '.join(GPUS)})"
        )
    gpus = int(match[1])
    gpu = GPUS[match[2]]
    return Cluster(gpus, gpu, min(int(match[3] or 8), gpus), gpu.link)


def parse_gpu(text: str) -> Gpu:
    """Return the GPU of this name; ResourceError if it is unknown."""
    if text.strip().lower() not in GPUS:
        raise ResourceError(
            f"--gpu {text!r} is not a known GPU; use one of {', '.join(GPUS)}, or the nearest of "
            "them with --memory"
        )
    return GPUS[text.strip().lower()]


def describe_clusters(run: DryRun, clusters: Sequence[Cluster]) -> list[dict[str, Any]]:
    """Return the forecasts of the best splits of each cluster as JSON data.

    `scaled` is the best split with as many more prompts as the cluster has more GPUs than the first
    one. `refused` is the reason why no split fits. The first split takes the fewest GPUs, `used`,
    of those that are about as fast as the fastest.
    """
    work = build_workload(run)
    ahead = run.recipe.rollout.max_staleness > 0
    return [
        _describe_cluster(work, cluster, cluster.gpus / clusters[0].gpus, ahead=ahead)
        for cluster in clusters
    ]


def describe_sites(run: DryRun) -> dict[str, dict[str, float]]:
    """Return the bytes and seconds per step between two sites, by the part at the second site."""
    seconds_a_byte = 8 / (SITE_GBIT * 1e9)
    return {
        name: {"bytes": size, "seconds": size * seconds_a_byte}
        for name, size in count_site_bytes(build_workload(run)).items()
        if size
    }


def build_workload(run: DryRun) -> Workload:
    """Return the requests of a dry run's step to its models."""
    record, recipe = run.record, run.recipe
    prompts = [len(request.prompt_tokens) for request in record.sample_requests.get("student", ())]
    answer = run.answer_tokens
    texts = _list_texts(run)
    read = count_read_tokens(texts)
    supervised = sum(int(datum.rollout.loss_mask.sum()) for datum in record.datums)
    scorers = tuple(_build_scoring(run, name) for name in record.scorers)
    heads = sum(s.dims.count_head_flops(s.tokens) for s in scorers if s.sends_hidden)
    learning = record.trainable_dims
    recomputed = run.recomputed or record.body(True)
    return Workload(
        student=record.dims,
        learning=learning,
        completions=len(prompts),
        sampled_tokens=answer * len(prompts),
        longest_answer=answer if prompts else 0,
        longest=max((len(prompt) + count for prompt, count in texts), default=1),
        contexts=sum(answer * length + answer * (answer + 1) // 2 for length in prompts),
        sample_flops=round(run.metrics["cost/flops_sample"]),
        texts=len(texts),
        update_tokens=read.tokens,
        update_flops=heads
        + learning.count_update_flops(record.dims, read, supervised, recompute=True),
        # Gathered weights are counted separately; the fixed part here is the casts of whole layers.
        graph=Line(0, recomputed.update.each),
        logit_bytes=count_tiles(recipe.objective)
        * LOGIT_TOKENS
        * record.dims.vocabulary
        * FLOAT_BYTES,
        scorers=scorers,
        learners=tuple(_build_learning(run, name) for name in record.scalars),
        item_bytes=get_item_bytes(record.dtype),
    )


def _build_learning(run: DryRun, name: str) -> LearningWork:
    scalar = run.record.scalars[name]
    dims, learning = scalar.dims, scalar.trainable_dims
    # Each call reads its texts again.
    calls = [
        (verb, count_read_tokens([(text.prompt_tokens, len(text.tokens)) for text in texts]))
        for verb, texts in run.record.scalar_calls[name]
    ]
    longest = max((len(prompt) + count for prompt, count in _list_texts(run)), default=1)
    return LearningWork(
        name=name,
        num_bytes=STATE_BYTES * learning.parameters
        + count_frozen_bytes(scalar.config, scalar.dims, scalar.trainable_dims)
        + scalar.body.update.compute_bytes(longest),
        flops=sum(
            dims.count_hidden_flops(read.tokens, read.contexts)
            if verb == "predict"
            else learning.count_update_flops(dims, read, 0)
            for verb, read in calls
        ),
        item_bytes=get_item_bytes(scalar.config.dtype),
    )


def _list_texts(run: DryRun) -> list[tuple[tuple[int, ...], int]]:
    """Return each trained text's prompt and the number of tokens after it."""
    return [(datum.rollout.prompt_tokens, len(datum.rollout.tokens)) for datum in run.record.datums]


def _build_scoring(run: DryRun, name: str) -> ScoringWork:
    scorer, requests = run.record.scorers[name], run.record.score_requests.get(name, [])
    read = count_read_tokens([(request.prompt_tokens, len(request.tokens)) for request in requests])
    tokens = sum(len(request.tokens) for request in requests)
    gives_states = sends_hidden(run, name)
    flops = scorer.dims.count_hidden_flops(read.tokens, read.contexts)
    return ScoringWork(
        name=name,
        dims=scorer.dims,
        tokens=tokens,
        flops=flops + (0 if gives_states else scorer.dims.count_head_flops(tokens)),
        forward=scorer.body.forward,
        item_bytes=get_item_bytes(
            run.record.dtype if scorer.config is None else scorer.config.dtype
        ),
        sends_hidden=gives_states,
        is_student=scorer.config is None,
    )


def _describe_cluster(
    work: Workload, cluster: Cluster, factor: float, *, ahead: bool
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "gpus": cluster.gpus,
        "gpu": cluster.gpu.name,
        "per_node": cluster.per_node,
        "usable_bytes": cluster.usable_memory,
        "learners": [learner.name for learner in work.learners],
    }
    try:
        forecasts = choose_split(work, cluster, ahead=ahead)
    except ResourceError as error:
        return described | {"refused": str(error), "used": 0, "splits": [], "scaled": None}
    scaled = None
    if factor != 1.0:
        best = choose_split(scale_workload(work, factor), cluster, ahead=ahead)[0]
        scaled = {"factor": factor, **_describe_forecast(best)}
    smallest = find_smallest(work, cluster, forecasts[0].step_seconds, ahead=ahead)
    best = [smallest, *(forecast for forecast in forecasts[:BEST] if forecast != smallest)]
    splits = [_describe_forecast(forecast) for forecast in best]
    used = count_gpus(work, smallest.split) + len(work.learners)
    return described | {"refused": None, "used": used, "splits": splits, "scaled": scaled}


def _describe_forecast(forecast: Forecast) -> dict[str, Any]:
    return asdict(forecast)
