"""The losses that TRL offers as functions equal ours, or differ only as laboratory/log.md describes.

Needs `pip install trl`; written against TRL 1.16.
"""

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from practicum import functional as F

from .worlds import RolloutBatch, close, gradient, random_batch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

ONE_LENGTH = [("a", 1.0, 4), ("a", 0.0, 4), ("b", 1.0, 4)]
"""Answers without padding, so that TRL's [answers, tokens] are our tokens end to end."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trl(path: str):
    """Return an attribute of a module of TRL, `trainer.utils:selective_log_softmax`."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"trl.{module}"), name)


def theirs(function, batch: RolloutBatch) -> torch.Tensor:
    """Return the gradient in the student's logits [T, V] of a loss of the logits [answers, tokens, V] of both."""
    here = batch.leaf()
    shape = (len(batch.answers), -1, batch.logits.shape[-1])
    return torch.autograd.grad(function(here.logits.view(shape), here.T.view(shape)), here.logits)[
        0
    ]


JSD_LOSSES = [
    "experimental.gkd.gkd_trainer:GKDTrainer",
    "experimental.gold.gold_trainer:GOLDTrainer",
    "experimental.iw_opd.iw_opd_trainer:IWOPDTrainer",
]


@pytest.mark.parametrize("trainer", JSD_LOSSES)
@pytest.mark.parametrize(
    ("beta", "divergence"),
    [(0, "forward_kl"), (0.1, "jsd(0.1)"), (0.5, "jsd(0.5)"), (0.9, "jsd(0.9)"), (1, "reverse_kl")],
)
def test_generalized_jsd_is_ours_at_the_same_beta_and_a_mean_over_tokens(trainer, beta, divergence):
    batch, jsd = random_batch(rows=ONE_LENGTH), trl(trainer).generalized_jsd_loss
    labels = torch.zeros(3, 4, dtype=torch.long)
    close(
        gradient({"divergence": divergence}, batch),
        theirs(lambda s, t: jsd(s, t, labels, beta=beta), batch),
    )


def test_its_scale_jumps_at_both_ends_where_ours_normalised_does_not():
    batch, jsd = random_batch(rows=ONE_LENGTH), trl(JSD_LOSSES[0]).generalized_jsd_loss
    for end, near in ((0, 1e-3), (1, 1 - 1e-3)):
        at, beside = (
            theirs(lambda s, t, beta=beta: jsd(s, t, torch.zeros(3, 4), beta=beta), batch)
            for beta in (end, near)
        )
        assert beside.norm() < 0.01 * at.norm()
        ours = [gradient({"divergence": f"jsd_normalized({beta})"}, batch) for beta in (end, near)]
        assert (ours[1] - ours[0]).norm() < 0.05 * ours[0].norm()
        close(ours[0], at)


def test_its_temperature_is_of_both_where_ours_is_of_the_teacher():
    batch, jsd = random_batch(rows=ONE_LENGTH), trl(JSD_LOSSES[0]).generalized_jsd_loss
    found = jsd(batch.logits[None], batch.T[None], beta=0.5, temperature=2.0, reduction="none").sum(
        -1
    )[0]
    torch.testing.assert_close(found, F.jsd(F.temper(batch.S, 2.0), F.temper(batch.T, 2.0), 0.5))


@pytest.mark.parametrize(
    ("beta", "support", "divergence"),
    [(0, "teacher", "forward_kl"), (0.5, "union", "jsd(0.5)"), (1, "student", "reverse_kl")],
)
@pytest.mark.parametrize(("tail", "kept"), [(True, "bucket"), (False, "renorm")])
def test_its_top_k_takes_the_support_that_beta_names(beta, support, divergence, tail, kept):
    batch, jsd = (
        random_batch(rows=ONE_LENGTH, vocabulary=12),
        trl(JSD_LOSSES[2]).generalized_jsd_loss,
    )
    labels = torch.zeros(3, 4, dtype=torch.long)
    close(
        gradient({"signal": f"topk(3, {support}, {kept})", "divergence": divergence}, batch),
        theirs(lambda s, t: jsd(s, t, labels, beta=beta, top_k=3, add_tail=tail), batch),
    )


@pytest.mark.parametrize("package", ["sdpo", "sdft"])
@pytest.mark.parametrize(
    ("alpha", "divergence"), [(0.0, "forward_kl"), (0.5, "jsd(0.5)"), (1.0, "reverse_kl")]
)
@pytest.mark.parametrize(("tail", "kept"), [(True, "bucket"), (False, "renorm")])
def test_self_distillation_over_the_students_candidates(package, alpha, divergence, tail, kept):
    batch = random_batch(rows=ONE_LENGTH, vocabulary=12)
    loss = trl(f"experimental.{package}.loss_utils:compute_topk_self_distillation_loss")
    close(
        gradient({"signal": f"topk(4, student, {kept})", "divergence": divergence}, batch),
        theirs(
            lambda s, t: loss(
                s, t, distillation_topk=4, distillation_alpha=alpha, distillation_add_tail=tail
            ).mean(),
            batch,
        ),
    )


def test_sdpo_whole_with_its_truncated_ratio():
    """lerp(student, teacher, alpha) weighs the teacher by alpha, as our beta does."""
    batch = random_batch(rows=ONE_LENGTH, vocabulary=12)
    module = "experimental.sdpo.loss_utils:"
    topk, clip = (trl(module + name) for name in TOPK_AND_CLIP)

    def loss(student, teacher):
        tokens = topk(
            student,
            teacher,
            distillation_topk=4,
            distillation_alpha=0.3,
            distillation_add_tail=True,
        )
        own = student.log_softmax(-1).gather(-1, batch.ids.view(3, 4, 1))[..., 0]
        return clip(tokens, own, batch.sampler.view(3, 4), 2.0).mean(-1).mean()

    choice = {
        "signal": "topk(4, student, bucket)",
        "divergence": "jsd(0.3)",
        "correction": "ratio_truncate(2)",
        "aggregate": "seq_mean_token_mean",
    }
    close(gradient(choice, batch), theirs(loss, batch))


TOPK_AND_CLIP = ("compute_topk_self_distillation_loss", "apply_importance_sampling_clipping")


def test_its_sampled_token_loss_is_our_score_function():
    batch = random_batch(rows=ONE_LENGTH)
    loss = trl("experimental.sdpo.loss_utils:compute_sampled_token_self_distillation_loss")
    ids = batch.ids.view(3, 4)
    close(
        gradient({"signal": "sampled"}, batch),
        theirs(lambda s, t: loss(s, t, ids, distillation_alpha=1.0).mean(), batch),
    )


@pytest.mark.parametrize(
    ("beta", "divergence"), [(0.0, "forward_kl"), (0.3, "jsd(0.3)"), (1.0, "reverse_kl")]
)
def test_the_chunked_loss_of_its_distillation_trainer(beta, divergence):
    """From hidden states and heads, as ours is computed by the local backend."""
    generator = torch.Generator().manual_seed(0)
    hidden, other = torch.randn(2, 3, 4, 6, generator=generator)
    head, teacher_head = torch.randn(2, 9, 6, generator=generator)
    hidden.requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    loss, _, count = trl("trainer.distillation_trainer:_chunked_divergence_loss")(
        hidden, other, head, teacher_head, mask, beta
    )
    (found,) = torch.autograd.grad(loss, hidden)
    student, teacher = (hidden @ head.T).log_softmax(-1), (other @ teacher_head.T).log_softmax(-1)
    name, parameter = {"jsd(0.3)": ("jsd", 0.3)}.get(divergence, (divergence, None))
    value = F.DIVERGENCES[name].value(student, teacher, parameter)[mask.bool()].mean()
    assert count == mask.sum()
    torch.testing.assert_close(loss, value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, torch.autograd.grad(value, hidden)[0], rtol=1e-4, atol=1e-6)


def test_its_importance_weights_leave_the_token_itself_out_of_the_share():
    """Ours count it (arXiv 2606.22600), so theirs are larger by gamma times the token's share."""
    batch, gamma = random_batch(rows=ONE_LENGTH), 0.5
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=gamma,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    compute = trl(JSD_LOSSES[2])._compute_iw_opd_loss
    ids = batch.ids.view(3, 4)
    teacher = batch.of(batch.T).view(3, 4)
    on_policy = batch.of(batch.S).view(3, 4).detach()
    found = theirs(
        lambda s, t: compute(trainer, s, ids, torch.zeros(3, 4), teacher, on_policy), batch
    )
    gap = (teacher - on_policy).abs()
    more = gamma * gap / gap.sum(dim=-1, keepdim=True)
    ours = gradient({"signal": "sampled", "weights": f"importance({gamma})"}, batch)
    plain = gradient({"signal": "sampled"}, batch)
    close(ours + more.view(-1, 1) * plain, found)
