"""K-step returns from a teacher's logits (KETCHUP, arXiv 2504.19024)."""

PARTS = {"signals": ["logits"]}
