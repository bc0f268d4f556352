"""The cost of an update grows with its rollouts and tokens, and no faster: counted, not timed."""

import pytest
import torch
from counting import count_opcodes, count_reads

from practicum.backends.local.client_loss import forward_backward_targets
from practicum.backends.local.packing import QUERY_ROWS, PackedBatch
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.objective import Objective
from practicum.ports.hosting import GivenTokens
from practicum.types import Datum, ScoreRequest, TeacherSignal

from .tiny import data_for, random_tokens, rollout, tiny

CPU = torch.device("cpu")
OBJECTIVES = [
    {},
    {"divergence": "jsd(0.3)", "signal": "topk(5, union)"},
    {"signal": "sampled", "filter": "correct", "weights": "negative_advantage"},
    {"signal": "sampled", "reward": "add_advantage(0.5, group_mean)", "samples": "above_mean"},
    {"signal": "full", "estimator": "score_function(1)", "weights": "soft_or(0.5)"},
]


def train(data: list[Datum], objective: Objective, chunk_tokens: int) -> None:
    model = tiny()
    model.model.requires_grad_(True)
    limits = TrainerLimits(micro_batch_tokens=64, chunk_tokens=chunk_tokens)
    LocalTrainer(model, limits).forward_backward(data, objective, 0)


def many(count: int) -> list[Datum]:
    items = [rollout(6, 8, seed, group=f"group {seed // 4}") for seed in range(count)]
    return data_for(tiny(seed=7), items)


@pytest.mark.parametrize("words", [OBJECTIVES[0], *OBJECTIVES[2:4]])
def test_an_update_of_four_times_the_rollouts_takes_four_times_the_steps(words):
    objective = Objective.model_validate(words)
    few, more = (
        count_opcodes(lambda data=data: train(data, objective, 16)) for data in (many(16), many(64))
    )
    assert more < 4.4 * few


@pytest.mark.parametrize("words", OBJECTIVES)
def test_no_chunk_waits_for_a_number(monkeypatch, words):
    objective, data = Objective.model_validate(words), many(8)
    whole, chunked = (
        count_reads(monkeypatch, lambda size=size: train(data, objective, size)) for size in (64, 2)
    )
    assert whole == chunked


def test_a_teacher_that_lacks_tokens_is_no_reason_to_wait(monkeypatch):
    def build(item: Datum) -> Datum:
        logprobs = torch.full((len(item.rollout.tokens),), -1.0)
        unknown = torch.arange(len(logprobs)) % 3 == 0
        return Datum(item.rollout, TeacherSignal(logprobs=logprobs, unknown=unknown, name="b"))

    data = [build(item) for item in many(8)]
    objective = Objective.model_validate({"signal": "sampled"})
    whole, chunked = (
        count_reads(monkeypatch, lambda size=size: train(data, objective, size)) for size in (64, 2)
    )
    assert whole == chunked


def test_a_loss_of_given_targets_is_read_once_a_text(monkeypatch):
    def run(size: int) -> None:
        model = tiny()
        model.model.requires_grad_(True)
        tokens = random_tokens(24, 3)
        datum = GivenTokens(
            tokens, torch.tensor(tokens)[:, None], lambda logprobs, piece: -logprobs
        )
        trainer = LocalTrainer(model, TrainerLimits(chunk_tokens=size))
        forward_backward_targets(trainer, [datum] * 2, 0)

    assert count_reads(monkeypatch, lambda: run(2)) == count_reads(monkeypatch, lambda: run(32))


def build_groups(count: int, length: int = 40) -> list[ScoreRequest]:
    """Return four ragged completions of each prompt, under one system prompt."""
    system = random_tokens(32, 1)
    return [
        ScoreRequest(
            (*system, *random_tokens(length, 2 + number // 4)),
            random_tokens(length + number % 4 * 9, number),
        )
        for number in range(count)
    ]


def count_bytes(batch: PackedBatch) -> int:
    tensors = [batch.ids, batch.positions, batch.output_positions, batch._mask]
    tensors += [index for group in batch._groups for index in (group.padded, group.real)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def test_a_packing_grows_with_its_texts():
    few, more = build_groups(16), build_groups(64)
    assert count_opcodes(lambda: PackedBatch(more, CPU)) < 4.2 * count_opcodes(
        lambda: PackedBatch(few, CPU)
    )
    small, large = PackedBatch(few, CPU), PackedBatch(more, CPU)
    assert count_bytes(large) < 4 * count_bytes(small)
    assert large._mask.shape == small._mask.shape


def test_the_mask_of_shared_prompts_grows_with_their_length():
    """Check masks: 64 texts of a thousand tokens took 310 MB of them."""
    short, long = (PackedBatch(build_groups(64, length), CPU) for length in (500, 1000))
    assert count_bytes(long) < 2 * count_bytes(short)
    assert long._mask.nbytes <= 4 * QUERY_ROWS * (QUERY_ROWS + 32 + 2 * 1000 + 27)
