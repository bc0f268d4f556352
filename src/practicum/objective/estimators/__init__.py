"""The estimators of a term, one file each: a class `Config`, see `objective.estimator_call`."""

NEEDED = ("Config",)
"""The names that a module of another package must have to be an estimator."""

REFUSED = {
    "k1": (
        "k1 back-propagated has an expected gradient of zero; write score_function, "
        "which has it as a reward and gives the gradient of reverse KL"
    ),
    "k2": "k2 back-propagated is called k2_surrogate here: it has the gradient of reverse KL",
    "k3": (
        "k3 back-propagated has the gradient of forward KL; write score_function with divergence: "
        "forward_kl for that, or k2_surrogate for reverse KL"
    ),
    "value_as_reward": (
        "a divergence's value at a state says nothing about the token that was sampled there; "
        "write score_function, which has the divergence's advantage (r f'(r) - f(r))"
    ),
}
"""The names that are refused, each with its real effect and what to write instead."""
