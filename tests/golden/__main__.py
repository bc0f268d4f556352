"""Rewrite the golden curves: `python -m tests.golden`, after a change that is meant to change numbers.

Commit them together with that change and explain why they moved. Other changes must not move them.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_golden import rewrite

torch.set_num_threads(1)
for path in rewrite():
    print(f"wrote {path}")
