"""Maps between two models' states: exact where they exist, least squares elsewhere, for any division into parts."""

import torch

from practicum.functional.dual_space import fit_map


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_maps_that_exist_are_found_and_are_each_others_inverse() -> None:
    teacher, between = draw(0, 11, 4), draw(1, 4, 4)
    student = teacher @ between.T
    torch.testing.assert_close(fit_map(student, teacher), between)
    torch.testing.assert_close(fit_map(teacher, student), torch.linalg.inv(between))


def test_elsewhere_the_logits_are_kept_as_well_as_a_map_can() -> None:
    student, teacher = draw(2, 11, 3), draw(3, 11, 5)
    to_teacher = fit_map(student, teacher, parts=4)
    torch.testing.assert_close(to_teacher, torch.linalg.lstsq(teacher, student).solution.T)
    to_student = fit_map(teacher, student, parts=4)
    torch.testing.assert_close(to_student, torch.linalg.lstsq(student, teacher).solution.T)
    states = draw(4, 2, 3)
    missed = (states @ to_teacher @ teacher.T - states @ student.T).norm()
    for seed in range(3):
        other = to_teacher + 0.01 * draw(seed, 3, 5)
        assert missed < (states @ other @ teacher.T - states @ student.T).norm()


def test_fewer_tokens_than_widths_leave_a_map() -> None:
    student, teacher = draw(5, 2, 3), draw(6, 2, 5)
    assert fit_map(student, teacher).isfinite().all() and fit_map(teacher, student).isfinite().all()
