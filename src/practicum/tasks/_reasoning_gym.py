"""reasoning-gym behind a deadline, items and scores: `python -m practicum.tasks._reasoning_gym SETTINGS`.

Items are made in the process that scores them, because some generators make other items in another process. A reply that the
package would evaluate as code has to be a sentence of a grammar of ours first.
"""

import json
import os
import sys
from functools import lru_cache
from typing import Any

from practicum.tasks._evaluating import admit, unguarded
from practicum.tasks._worker import VerifierUnavailable, serve


def main() -> None:
    """Serve the names of all generators, or the items of one with their scores."""
    # One of the package's packages imports matplotlib, which insists on a folder of its own that seems to be writable.
    os.environ["MPLCONFIGDIR"] = os.path.expanduser("~")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    settings = json.loads(sys.argv[1])
    name, config, sizes = settings["generator"], settings["config"], settings["sizes"]

    @lru_cache
    def dataset(split: str) -> Any:
        evaluated = unguarded(name, DATASETS[name][0])
        if evaluated:
            raise VerifierUnavailable(
                f"task.generator: {name!r} would run a model's reply as code ({', '.join(sorted(evaluated))}), and no grammar "
                "says which replies are harmless; take another generator"
            )
        try:
            return reasoning_gym.create_dataset(
                name, seed=settings["seeds"][split], size=sizes[split], **config
            )
        except Exception as error:
            # A generator refuses its settings with whatever error it likes.
            what = str(error) or type(error).__name__
            raise VerifierUnavailable(
                f"task.config: the generator {name!r} does not take {config} ({what})"
            ) from error

    @lru_cache(maxsize=1024)
    def item(split: str, number: int) -> dict[str, Any]:
        return dataset(split)[number]

    def answer(request: dict[str, Any]) -> Any:
        if "split" not in request:
            return sorted(DATASETS)
        made = item(request["split"], request["number"])
        if "reply" not in request:
            right = made["answer"]
            return {
                "question": str(made["question"]),
                "answer": None if right is None else str(right),
            }
        sentence = admit(name, request["reply"], str(made["answer"]))
        return (
            0.0
            if sentence is None
            else float(dataset(request["split"]).score_answer(sentence, entry=made))
        )

    serve(answer)


if __name__ == "__main__":
    main()
