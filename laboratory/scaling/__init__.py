"""A scaling law of on-policy distillation: its cells, its forms and its predictions."""
