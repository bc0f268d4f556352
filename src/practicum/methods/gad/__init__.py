"""A teacher without probabilities, and a discriminator of answers (GAD, arXiv 2511.10643)."""

PARTS = {"scorers": ["discriminator"], "teachers": ["text_only"]}
