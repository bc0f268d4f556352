"""HPD's two tokens: every sampled token by its probability, against the released code's rule."""

import torch

from practicum.methods.hpd.hybrid import Config
from practicum.objective.distribution import DrawnTokens


def compute(student: torch.Tensor, teacher: torch.Tensor, token: int, sampled: int) -> torch.Tensor:
    drawn = DrawnTokens(
        student[None], teacher[None], torch.tensor([token]), torch.tensor([[sampled]]), torch.sub
    )
    return Config().compute_drawn_loss(drawn)[0]


def test_each_case_counts_what_the_released_code_counts() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.2, 0.6, 0.15, 0.05], dtype=torch.float64)
    gaps = p * (q / p).log()
    for token in range(4):
        for sampled in range(4):
            logits = p.log().requires_grad_()
            compute(logits, q.log(), token, sampled).backward()
            expected = torch.zeros(4, dtype=torch.float64)
            expected[token] -= gaps[token]
            if token == 1:  # the only token that the teacher finds more likely
                expected[token] -= q[token] * (2 if sampled == 0 else 1)
            if sampled == 0 != token:  # the only token that the student finds more likely
                expected[sampled] -= gaps[sampled]
            torch.testing.assert_close(logits.grad, expected)


def test_a_student_that_agrees_stays_and_an_expected_step_approaches_the_teacher() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        student, teacher = logits.log_softmax(-1)
        agreed = [compute(teacher, teacher, y, w) for y in range(6) for w in range(6)]
        assert all(value == 0 for value in agreed)
        # The text is the teacher's, and each sampled token has the student's probability.
        leaf = logits[0].clone().requires_grad_()
        own = leaf.log_softmax(-1)
        loss = sum(
            teacher[y].exp() * student[w].exp() * compute(own, teacher, y, w)
            for y in range(6)
            for w in range(6)
        )
        (step,) = torch.autograd.grad(loss, leaf)

        def forward_kl(logits: torch.Tensor, teacher: torch.Tensor = teacher) -> torch.Tensor:
            return (teacher.exp() * (teacher - logits.log_softmax(-1))).sum()

        assert forward_kl(logits[0] - 0.01 * step) < forward_kl(logits[0])
