"""Compare a reply with the expected answer: verifiers, their processes, and checks of the answers."""
