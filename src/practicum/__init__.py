"""On-policy distillation of language models: one loop, every method a configuration."""
