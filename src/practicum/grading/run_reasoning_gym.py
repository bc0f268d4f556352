"""reasoning-gym in its own process: `python -m practicum.grading.run_reasoning_gym SETTINGS`.

The process that scores an entry also generates it, because some generators give other entries in
another process. A reply that the package would evaluate as code must first be a sentence of one of
our grammars.
"""

import json
import os
import sys
from functools import lru_cache
from typing import Any, SupportsFloat

from practicum.grading.evaluating import admit, find_unguarded
from practicum.sandbox.worker import VerifierUnavailable, serve


def run() -> None:
    """Serve the names of all generators, or the entries of one generator with their scores."""
    # A dependency of the package imports matplotlib, which requires a writable config folder.
    os.environ["MPLCONFIGDIR"] = os.path.expanduser("~")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    settings = json.loads(sys.argv[1])
    name, config, sizes = settings["generator"], settings["config"], settings["sizes"]

    @lru_cache
    def create_dataset(split: str) -> Any:
        unguarded = find_unguarded(name, DATASETS[name][0])
        if unguarded:
            raise VerifierUnavailable(
                f"task.generator: {name!r} would run a model's reply as code "
                f"({', '.join(sorted(unguarded))}), and no grammar says which replies are "
                "harmless; take another generator"
            )
        try:
            return reasoning_gym.create_dataset(
                name, seed=settings["seeds"][split], size=sizes[split], **config
            )
        except Exception as error:
            # A generator refuses its settings with any kind of error.
            reason = str(error) or type(error).__name__
            raise VerifierUnavailable(
                f"task.config: the generator {name!r} does not take {config} ({reason})"
            ) from error

    # A step scores several replies to each of its questions, and some generators are slow.
    @lru_cache(maxsize=1024)
    def generate(split: str, number: int) -> dict[str, Any]:
        return create_dataset(split)[number]

    def respond(request: dict[str, Any]) -> Any:
        if "split" not in request:
            return sorted(DATASETS)
        entry = generate(request["split"], request["number"])
        answer = entry["answer"]
        if "reply" not in request:
            text = None if answer is None else str(answer)
            return {"question": str(entry["question"]), "answer": text}
        sentence = admit(name, request["reply"], str(answer))
        if sentence is None:
            return 0.0
        score = create_dataset(request["split"]).score_answer(sentence, entry=entry)
        if not isinstance(score, SupportsFloat):
            raise TypeError(f"its score is {score!r:.80}, which is no number")
        return float(score)

    serve(respond)


if __name__ == "__main__":
    run()
