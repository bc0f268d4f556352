"""The pages of studies: how judgements are written."""

from laboratory.page import join_judgements


def test_a_judgement_at_equal_flops_follows_that_at_equal_steps_without_its_arms() -> None:
    texts = [
        "a - b, accuracy: +0.1",
        "a / c, length: 0.5",
        "d - e, accuracy at step 3: +0.2",
        "a - b, accuracy at equal FLOPs: -0.3",
        "d - e, accuracy at equal FLOPs: -0.4",
    ]
    assert join_judgements(texts) == (
        "a - b: +0.1; at equal FLOPs: -0.3; a / c, length: 0.5; d - e, accuracy at step 3: +0.2; "
        "d - e, accuracy at equal FLOPs: -0.4"
    )
    assert join_judgements([]) == ""
