"""Run every arm as `runs` does, then decode held-out prompts with its drafter, as a chain and as a tree.

The readings of a run, for a chain without a prefix and for a tree with `tree/`:

- `tokens_per_call`: tokens per call of the target, after the prompt's call.
- `acceptance`: share of the examined drafts that are accepted; `acceptance_K` at depth K.
- `speed_B`: completion tokens per processor second, in multiples of decoding without a drafter, with
  B texts at a time. All three take turns and write the same text, as `rollout.draft` does.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Literal

from pydantic import Field

from laboratory.measures.runs import measure_with
from laboratory.results import Results
from laboratory.study import ReproductionJob
from practicum.backends.local.drafting import DraftingSampler
from practicum.backends.local.sampler import LocalSampler
from practicum.ports.metering import MeteredSampler
from practicum.rollouts import measure_drafts
from practicum.run_dir import read_json, write_json
from practicum.runs import open_run, restore_components
from practicum.runs.assembly import RunComponents
from practicum.training.evaluation import EvaluationSettings, answer_heldout
from practicum.types import FrozenConfig, Rollout

BATCHES = {1: 2, 8: 8}
"""The number of texts at a time, with the number of prompts that are timed."""

ROUNDS = 3
"""The number of times that decoding without a drafter, by chains and by trees take turns; the first is not counted."""


class Config(FrozenConfig):
    """The drafts of a round: a chain of `chain` drafts, or a tree of `width` drafts at `depth` depths."""

    type: Literal["speculation"] = "speculation"
    chain: int = Field(default=4, ge=1)
    width: int = Field(default=3, ge=2)
    depth: int = Field(default=4, ge=1)


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run all arms, and measure their drafters."""
    return measure_with(lambda folder: measure_drafter(folder, config), job)


def measure_drafter(folder: Path, config: Config) -> Mapping[str, float]:
    """Return the readings of a finished run; they are measured once."""
    path = folder / f"speculation-{config.chain}-{config.width}-{config.depth}.json"
    if not path.is_file():
        built = restore_components(*open_run(folder))
        assert built.evaluation is not None, "a study of drafters has held-out prompts"
        write_json(path, _measure_drafter(built, built.evaluation, config))
    return read_json(path)


def _measure_drafter(
    built: RunComponents, settings: EvaluationSettings, config: Config
) -> dict[str, float]:
    metered = built.parts.sampler
    sampler = metered.bare if isinstance(metered, MeteredSampler) else metered
    assert isinstance(sampler, DraftingSampler), "the student of the study is a drafter"
    settings_by_prefix = {
        "": {"depth": config.chain, "width": 1},
        "tree/": {"depth": config.depth, "width": config.width, "verify": "shared"},
    }
    drafting = {
        prefix: replace(sampler, config=sampler.config.model_copy(update=changes))
        for prefix, changes in settings_by_prefix.items()
    }
    readings = dict[str, float]()
    for prefix, client in drafting.items():
        drafts = measure_drafts(_answer(built, client, settings))
        readings |= {name.replace("drafts/", prefix): value for name, value in drafts.items()}
    for batch, count in BATCHES.items():
        timed = replace(settings, prompts=settings.prompts[:count])
        speeds = _compare_speeds(built, drafting, timed, batch)
        readings |= {f"{prefix}speed_{batch}": speed for prefix, speed in speeds.items()}
    return readings


def _compare_speeds(
    built: RunComponents,
    drafting: Mapping[str, DraftingSampler],
    settings: EvaluationSettings,
    batch: int,
) -> dict[str, float]:
    """Return the speed of each drafting sampler in multiples of the speed without a drafter."""
    model = next(iter(drafting.values())).language_model
    clients: dict[str, LocalSampler] = {
        "plain": LocalSampler(model, batch_size=batch),
        **{
            prefix: replace(
                client,
                batch_size=batch,
                config=client.config.model_copy(update={"verify": "shared"}),
            )
            for prefix, client in drafting.items()
        },
    }
    seconds, tokens = dict.fromkeys(clients, 0.0), dict.fromkeys(clients, 0)
    for number in range(ROUNDS):
        for name in clients if number % 2 else reversed(clients):
            start = process_time()
            rollouts = _answer(built, clients[name], settings)
            if number:
                seconds[name] += process_time() - start
                tokens[name] += sum(len(rollout.tokens) for rollout in rollouts)
    speeds = {name: tokens[name] / seconds[name] for name in clients}
    return {prefix: speeds[prefix] / speeds["plain"] for prefix in drafting}


def _answer(
    built: RunComponents, client: LocalSampler, settings: EvaluationSettings
) -> list[Rollout]:
    return answer_heldout(client, built.parts.renderer, built.parts.task, settings)
