"""One text by student and teacher: a rule writes each token from both models' distributions."""

PARTS = {
    "sources": ["adaswitch", "handover", "interleave", "relay", "speculative", "token_mix"],
    "tasks": ["topics"],
}
