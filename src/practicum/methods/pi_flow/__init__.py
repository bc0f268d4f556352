"""A flow that draws pictures and points in a few network calls (pi-Flow, arXiv 2510.14974).

A trajectory is a text of numbers: the prompt is the noise, and each substate is one token per
coordinate. So states are tokens, and the loop trains a flow as it trains a language model.
"""

PARTS = {"backends": ["flow"], "teachers": ["velocity"], "tasks": ["mixture"]}
