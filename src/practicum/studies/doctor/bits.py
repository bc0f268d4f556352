"""The check of teachers with fewer bits: the cost of their rounding on the student's own
answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from practicum import functional as F
from practicum.models.quantization import QUANTIZATIONS, count_weight_bytes
from practicum.objective import Full
from practicum.runs.check_outcome import CheckOutcome, Status, skip_check
from practicum.runs.opening import resolve_run
from practicum.runs.scoring import ScorerInfo
from practicum.statistics import Interval, cluster_bootstrap, group_pairs
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import find_worst_status, grade
from practicum.studies.doctor.measurements import CHUNK_TOKENS
from practicum.types import ScoreRequest, TeacherSignal

MAX_COST = (0.01, 0.1)
"""The KL in nats per token up to which a rounded teacher passes, and above which it fails."""

MIB = 2**20
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def check_bits(evidence: Evidence) -> CheckOutcome:
    """P21: Measure the divergence of a quantized teacher from the same model in full precision."""
    rounded = [scorer for scorer in evidence.scorers if scorer.config.quantization is not None]
    if not rounded:
        return skip_check("no teacher has fewer bits")
    # The prompt is the plain one of this model, without anything that a wrapping teacher adds.
    costs = {scorer.name: _measure_cost(evidence, scorer) for scorer in rounded}
    good, bad = MAX_COST
    worst = max(costs.values(), key=lambda cost: cost.mean)
    saved = {scorer.name: _count_mib(scorer) for scorer in rounded}
    text = "; ".join(
        f"{scorer.name} in {scorer.config.quantization}"
        f" ({QUANTIZATIONS[scorer.config.quantization].about}): {costs[scorer.name].mean:.2g} nats per "
        f"token, {saved[scorer.name][0]:.3g} of {saved[scorer.name][1]:.3g} MiB"
        for scorer in rounded
        if scorer.config.quantization is not None
    )
    details: dict[str, float | None] = {}
    for name, (rounded_mib, exact_mib) in saved.items():
        details |= {f"{name}, MiB": rounded_mib, f"{name} with all bits, MiB": exact_mib}
    statuses: list[Status] = [grade(cost, good, bad) for cost in costs.values()]
    status = find_worst_status(*statuses)
    paths = list(_find_rounded(evidence.recipe.model_dump()))
    fix = (f"{paths[0]}=null",) if len(paths) == 1 and status != "pass" else ()
    return CheckOutcome(status, text, worst, "nats per token", fix, details=details)


def _find_rounded(section: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each `quantization` of a recipe, however deep its teacher is."""
    if isinstance(section, Mapping):
        for key, value in section.items():
            if key == "quantization" and value is not None:
                yield f"{path}{key}"
            yield from _find_rounded(value, f"{path}{key}.")


def _measure_cost(evidence: Evidence, scorer: ScorerInfo) -> Interval:
    """Return KL(all bits || fewer bits) a token of the student's answers, over prompts."""
    rollouts = [rollout for rollout in evidence.rollouts if len(rollout.tokens)]
    prompts = scorer.renderer.render_all([rollout.prompt.messages for rollout in rollouts])
    requests = [
        ScoreRequest(prompt, tuple(rollout.tokens.tolist()))
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]
    exact = resolve_run(scorer.config.model_copy(update={"quantization": None}))
    clients = (
        evidence.components.backend.load_scorer(exact, scorer.name).client,
        scorer.client,
    )
    gaps = [
        _compare(*pair)
        for pair in zip(*(client.score(requests, Full()) for client in clients), strict=True)
    ]
    ids = [rollout.prompt.id for rollout in rollouts]
    groups = group_pairs(zip(ids, gaps, strict=True))
    return cluster_bootstrap([torch.cat(group) for group in groups.values()], evidence.seed)


def _compare(exact: TeacherSignal, rounded: TeacherSignal) -> Tensor:
    """Return the divergence at each token, a few full distributions at a time."""
    assert exact.states is not None and rounded.states is not None
    assert exact.head is not None and rounded.head is not None
    return torch.cat(
        [
            F.reverse_kl(
                exact.head.logprobs(exact.states[part]), rounded.head.logprobs(rounded.states[part])
            )
            .double()
            .cpu()
            for part in F.chunks(len(exact.states), CHUNK_TOKENS)
        ]
    )


def _count_mib(scorer: ScorerInfo) -> tuple[float, float]:
    """Return the MiB of a model's weights with fewer bits, and with all of them."""
    assert scorer.shape is not None, "a model with fewer bits is on this machine"
    shape, item_bytes = scorer.shape, ITEM_BYTES[scorer.config.dtype]
    sizes: Sequence[int] = [
        count_weight_bytes(shape.parameters, shape.body, item_bytes, name)
        for name in (scorer.config.quantization, None)
    ]
    return sizes[0] / MIB, sizes[1] / MIB
