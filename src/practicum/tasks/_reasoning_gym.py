"""reasoning-gym behind a deadline, items and scores: `python -m practicum.tasks._reasoning_gym SETTINGS`.

Items are made in the process that scores them, because some generators make other items in another process.
"""

import json
import sys
from functools import lru_cache
from typing import Any

from practicum.tasks._worker import Refused, serve


def main() -> None:
    """Serve the names of all generators, or the items of one with their scores."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    settings = json.loads(sys.argv[1])
    name, config, sizes = settings["generator"], settings["config"], settings["sizes"]

    @lru_cache
    def dataset(split: str) -> Any:
        try:
            return reasoning_gym.create_dataset(name, seed=settings["seeds"][split], size=sizes[split], **config)
        except Exception as error:
            # A generator refuses its settings with whatever error it likes.
            what = str(error) or type(error).__name__
            raise Refused(f"task.config: the generator {name!r} does not take {config} ({what})") from error

    @lru_cache(maxsize=1024)
    def item(split: str, number: int) -> dict[str, Any]:
        return dataset(split)[number]

    def answer(request: dict[str, Any]) -> Any:
        if "split" not in request:
            return sorted(DATASETS)
        made = item(request["split"], request["number"])
        if "reply" not in request:
            right = made["answer"]
            return {"question": str(made["question"]), "answer": None if right is None else str(right)}
        score = float(dataset(request["split"]).score_answer(request["reply"], entry=made))
        if not 0 <= score <= 1:
            raise ValueError(f"a score of {score}")
        return score

    serve(answer)


if __name__ == "__main__":
    main()
