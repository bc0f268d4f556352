"""Maps between two models' states: exact where they exist, least squares elsewhere, for any division into parts."""

import torch

from practicum.functional.dual_space import fit_projections


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_maps_that_exist_are_found_and_are_each_others_inverse() -> None:
    teacher, between = draw(0, 11, 4), draw(1, 4, 4)
    maps = fit_projections(teacher @ between.T, teacher)
    torch.testing.assert_close(maps.to_teacher, between)
    torch.testing.assert_close(maps.to_student, torch.linalg.inv(between))


def test_elsewhere_the_logits_are_kept_as_well_as_a_map_can() -> None:
    student, teacher = draw(2, 11, 3), draw(3, 11, 5)
    maps = fit_projections(student, teacher, parts=4)
    slow = torch.linalg.lstsq(teacher, student).solution.T, torch.linalg.lstsq(student, teacher)
    torch.testing.assert_close(maps.to_teacher, slow[0])
    torch.testing.assert_close(maps.to_student, slow[1].solution.T)
    states = draw(4, 2, 3)
    missed = (states @ maps.to_teacher @ teacher.T - states @ student.T).norm()
    for seed in range(3):
        other = maps.to_teacher + 0.01 * draw(seed, 3, 5)
        assert missed < (states @ other @ teacher.T - states @ student.T).norm()


def test_fewer_tokens_than_widths_leave_a_map() -> None:
    maps = fit_projections(draw(5, 2, 3), draw(6, 2, 5))
    assert maps.to_teacher.isfinite().all() and maps.to_student.isfinite().all()
