"""A discriminator of the teacher"s answers and the student"s (GAD, arXiv 2511.10643)."""

PARTS = {"scorers": ["discriminator"]}
