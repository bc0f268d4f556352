"""A teacher's text alone, and a discriminator of its answers and the student's (GAD, arXiv 2511.10643)."""

PARTS = {"scorers": ["discriminator"], "teachers": ["text_only"]}
