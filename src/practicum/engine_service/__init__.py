"""vLLM, in this process or behind a URL, as an engine that samples with the student's weights."""
