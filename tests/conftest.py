"""Tests run on one thread and are the same every time."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("practicum", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("practicum")
