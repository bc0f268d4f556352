"""A binarised divergence of text chunks that two tokenizers share (ALM, arXiv 2503.20083)."""

PARTS = {"signals": ["chunks"]}
