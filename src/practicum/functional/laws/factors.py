"""The laws of the factors of a loss: weights, corrections, advantages and reward rules. Each law
takes an entry, its arguments, a seed and a number of tokens or completions.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from practicum.functional.advantages import Advantage, RewardRule
from practicum.functional.estimators import Correction
from practicum.functional.laws.requirements import require, show
from practicum.functional.samples import SampleStatistics, SampleWeight
from practicum.functional.table import Number
from practicum.functional.weights import TokenStatistics, Weight

Arguments = Mapping[str, Number]


def random_statistics(seed: int, length: int, **fields: Tensor | None) -> TokenStatistics:
    """Return random statistics of tokens that carry a gradient; `fields` replaces some of them."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(length, generator=generator).requires_grad_()

    statistics: dict[str, Tensor | None] = {
        "loss_mask": torch.rand(length, generator=generator) < 0.7,
        "student_entropy": draw(),
        "teacher_entropy": draw(),
        "divergence": draw(),
        "logprobs": -draw(),
        "teacher_logprobs": -draw(),
        "positions": torch.arange(length) % 4,
        "turns": torch.arange(length) % 4 // 2,
        "rows": torch.arange(length) // 4,
        "sampled_rank": (20 * draw().detach()).long(),
        "greedy_rank": (20 * draw().detach()).long(),
        "drafted_rank": (20 * draw().detach()).long(),
        "special": draw().detach() > 0.9,
        "reference_logprobs": -draw(),
    }
    return TokenStatistics(**{**statistics, **fields})  # type: ignore[arg-type]


def weight_is_a_factor(weight: Weight, arguments: Arguments, seed: int, length: int) -> None:
    """One finite, non-negative float32 number per token, 0 outside the mask, without a gradient."""
    statistics = random_statistics(seed, length)
    for mask in (statistics.loss_mask, statistics.loss_mask.float()):
        values = weight.function(dataclasses.replace(statistics, loss_mask=mask), **arguments)
        require(values.shape == mask.shape, f"{len(mask)} tokens have {list(values.shape)} weights")
        _require_factor(values)
        text = f"tokens outside the mask {mask.int().tolist()} weigh {show(values)}"
        require(values[mask == 0] == 0, text)


def weight_has_an_identity(weight: Weight, arguments: Arguments, seed: int, length: int) -> None:
    """At the arguments that `identity` names, every supervised token weighs 1."""
    if weight.identity is None:
        return
    statistics = random_statistics(seed, length)
    values = weight.function(statistics, **{**arguments, **weight.identity})
    text = f"at {dict(weight.identity)} the supervised tokens weigh {show(values)}"
    require(torch.equal(values.float(), statistics.loss_mask.float()), text)


def weight_drops_tokens(weight: Weight, arguments: Arguments, seed: int, length: int) -> None:
    """Only a weight with `drops` gives a token in the mask the weight 0."""
    statistics = random_statistics(seed, length)
    values = weight.function(statistics, **arguments)[statistics.loss_mask.bool()]
    text = f"tokens in the mask weigh {show(values)}, although drops is False"
    require(weight.drops or values > 0, text)


def weight_reads_what_it_needs(
    weight: Weight, arguments: Arguments, seed: int, length: int
) -> None:
    """It reads only the mask and the statistics in `needs`."""
    needed = {"loss_mask", *weight.needed(arguments)}
    names = [field.name for field in dataclasses.fields(TokenStatistics)]
    missing = dict.fromkeys(name for name in names if name not in needed)
    values = weight.function(random_statistics(seed, length, **missing), **arguments)
    expected = weight.function(random_statistics(seed, length), **arguments)
    text = f"with needs={sorted(needed - {'loss_mask'})} only, it is {show(values)}"
    require(torch.equal(values, expected), f"{text} and not {show(expected)}")


def weight_is_pointwise(weight: Weight, arguments: Arguments, seed: int, length: int) -> None:
    """A token's weight does not depend on other tokens, if `pointwise`: a batch may be split."""
    if not weight.pointwise:
        return
    statistics = random_statistics(seed, length)
    values = weight.function(statistics, **arguments)
    alone = [
        weight.function(
            TokenStatistics(
                **{
                    field.name: _list_statistics(statistics)[field.name][[place]]
                    for field in dataclasses.fields(TokenStatistics)
                }
            ),
            **arguments,
        )
        for place in range(length)
    ]
    apart = torch.cat([values[:0], *alone])
    text = f"computed separately the tokens weigh {show(apart)}, together {show(values)}"
    require(torch.equal(apart, values), text)


def _list_statistics(statistics: TokenStatistics) -> dict[str, Any]:
    """Return the statistics by name, the tensors themselves."""
    names = [field.name for field in dataclasses.fields(statistics)]
    return {name: getattr(statistics, name) for name in names}


def correction_is_one_on_policy(
    correction: Correction, arguments: Arguments, seed: int, length: int
) -> None:
    """It is 1 where learner and sampler agree, unless `of` is `probability`."""
    if correction.of == "probability":
        return
    factor = correction.function(torch.zeros(length), _draw_advantages(seed, length), **arguments)
    require(factor == 1.0, f"on policy it is {show(factor)}")


def correction_is_a_factor(
    correction: Correction, arguments: Arguments, seed: int, length: int
) -> None:
    """One finite, non-negative float32 number per token, without a gradient, at any staleness."""
    log_ratio = (6.0 * torch.rand(length, generator=_seeded(seed)) - 3.0).requires_grad_()
    advantage = _draw_advantages(seed, length).requires_grad_()
    for ratio in (log_ratio, log_ratio.bfloat16()):
        factor = correction.function(ratio, advantage, **arguments)
        require(factor.shape == ratio.shape, f"{length} tokens have {list(factor.shape)} factors")
        _require_factor(factor)


def sample_weight_is_a_factor(
    weight: SampleWeight, arguments: Arguments, seed: int, length: int
) -> None:
    """One finite, non-negative number per completion, independent of their order."""
    completions = _draw_completions(seed, length)
    values = weight.function(_make_sample_statistics(completions), **arguments)
    require(len(values) == length, f"{length} completions have {len(values)} weights")
    is_factor = all(0 <= value < float("inf") for value in values)
    require(is_factor, f"the completions weigh {list(values)}")
    _require_order(
        lambda rows: weight.function(_make_sample_statistics(rows), **arguments), completions, seed
    )


def sample_weight_reads_what_it_needs(
    weight: SampleWeight, arguments: Arguments, seed: int, length: int
) -> None:
    """It reads only `kept` and the statistics in `needs`."""
    statistics = _make_sample_statistics(_draw_completions(seed, length))
    needed = {"kept", *weight.needed(arguments)}
    part = SampleStatistics(**{name: getattr(statistics, name) for name in sorted(needed)})
    values = weight.function(part, **arguments)
    expected = weight.function(statistics, **arguments)
    text = f"with needs={sorted(needed - {'kept'})} only, it is {values} and not {expected}"
    require(list(values) == list(expected), text)


def advantage_of_each_reward(
    advantage: Advantage, arguments: Arguments, seed: int, length: int
) -> None:
    """One finite number per reward in any order, also if all are equal or the group is empty."""
    source = random.Random(seed)
    rewards = [source.choice([0.0, 0.5, 1.0, -1.0]) for _ in range(length)]
    anchor = [source.choice([0.0, 0.5, 1.0]) for _ in range(1 + seed % 4)]
    arguments_after = (anchor,) if advantage.anchored else ()
    for group in (rewards, [1.0] * length, []):
        values = list(advantage.function(group, *arguments_after))
        require(len(values) == len(group), f"the rewards {group} have {len(values)} advantages")
        is_finite = all(abs(value) < float("inf") for value in values)
        require(is_finite, f"the rewards {group} have the advantages {values}")
    _require_order(lambda group: advantage.function(list(group), *arguments_after), rewards, seed)


def reward_rule_is_an_advantage(
    rule: RewardRule, arguments: Arguments, seed: int, length: int
) -> None:
    """One finite float32 number per token, and no token's number depends on any other token."""
    teacher, reward = _draw_advantages(seed, length), _draw_advantages(seed + 1, length)
    log_ratio = 40.0 * _draw_advantages(seed + 2, length)
    values = rule.join(teacher, reward, log_ratio, arguments)
    require(values.shape == teacher.shape, f"{length} tokens have {list(values.shape)} advantages")
    require(values.dtype == torch.float32, f"the advantages are {values.dtype}")
    require(values.isfinite(), f"the advantages are {show(values)}")
    alone = [
        rule.join(teacher[[place]], reward[[place]], log_ratio[[place]], arguments)
        for place in range(length)
    ]
    apart = torch.cat([values[:0], *alone])
    text = f"computed separately the tokens have {show(apart)}, together {show(values)}"
    require(torch.allclose(apart, values), text)


def _require_factor(values: Tensor) -> None:
    require(not values.requires_grad, "it carries a gradient; detach what it is computed from")
    require(values.dtype == torch.float32, f"it is {values.dtype}; return float32, as .float()")
    require(values.isfinite() & (values >= 0), f"it is {show(values)}")


def _require_order(function: Callable[[Any], Sequence[float]], rows: list[Any], seed: int) -> None:
    """Require that a function of a list gives each entry the same number in any order."""
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    values, shuffled = function(rows), function([rows[place] for place in order])
    is_same = all(
        abs(a - values[place]) <= 1e-6 * max(1.0, abs(a))
        for a, place in zip(shuffled, order, strict=True)
    )
    require(is_same, f"{rows} give {list(values)}, in the order {order} {list(shuffled)}")


def _draw_completions(seed: int, length: int) -> list[tuple[Any, ...]]:
    """Return completions: kept, reward, text, and the three mean negative log-probabilities."""
    source = random.Random(seed)
    return [
        (
            source.random() < 0.7,
            source.choice([None, 0.0, 0.5, 1.0]),
            source.choice("xyz"),
            *(round(5 * source.random(), 2) for _ in range(3)),
        )
        for _ in range(length)
    ]


def _make_sample_statistics(completions: Sequence[tuple[Any, ...]]) -> SampleStatistics:
    columns = list(zip(*completions, strict=True))
    names = [field.name for field in dataclasses.fields(SampleStatistics)]
    return SampleStatistics(**dict(zip(names, columns, strict=True)))


def _draw_advantages(seed: int, length: int) -> Tensor:
    return torch.randn(length, generator=_seeded(seed))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WEIGHT_LAWS = (
    weight_is_a_factor,
    weight_has_an_identity,
    weight_drops_tokens,
    weight_reads_what_it_needs,
    weight_is_pointwise,
)
CORRECTION_LAWS = (correction_is_one_on_policy, correction_is_a_factor)
SAMPLE_WEIGHT_LAWS = (sample_weight_is_a_factor, sample_weight_reads_what_it_needs)
ADVANTAGE_LAWS = (advantage_of_each_reward,)
REWARD_LAWS = (reward_rule_is_an_advantage,)
