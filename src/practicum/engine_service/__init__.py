"""An engine in a process of its own that samples with the student's weights."""
