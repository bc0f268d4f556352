"""One text by student and teacher: a rule writes each token from both models' distributions."""

PARTS = {
    "sources": ["interleave", "speculative", "token_mix"],
    "tasks": ["topics"],
}
