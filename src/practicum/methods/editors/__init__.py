"""One text by student and teacher: a rule writes each token from both models' distributions."""

PARTS = {"sources": ["interleave", "token_mix"]}
