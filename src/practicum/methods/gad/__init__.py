"""A text-only teacher and a discriminator of answers (GAD, arXiv 2511.10643)."""

PARTS = {"scorers": ["discriminator"], "teachers": ["text_only"]}
