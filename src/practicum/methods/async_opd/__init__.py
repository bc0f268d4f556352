"""Several tokens drawn from the student at each state (arXiv 2606.24143)."""

PARTS = {"signals": ["mc"]}
