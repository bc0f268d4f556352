"""Two linear maps between the hidden states of two models (DSKDv2, arXiv 2504.11426)."""

PARTS = {"signals": ["dual_space"]}
