"""reasoning-gym's scorers behind a deadline: `python -m practicum.tasks._reasoning_gym SETTINGS`."""

import json
import sys
from typing import Any

from practicum.tasks._worker import serve


def main() -> None:
    """Serve the scores of one generator; its items are made again from the same seeds."""
    import reasoning_gym

    settings = json.loads(sys.argv[1])
    datasets = {
        split: reasoning_gym.create_dataset(settings["generator"], seed=seed, size=2**30, **settings["config"])
        for split, seed in settings["seeds"].items()
    }

    def score(request: dict[str, Any]) -> float:
        dataset = datasets[request["split"]]
        return float(dataset.score_answer(request["reply"], entry=dataset[request["number"]]))

    serve(score)


if __name__ == "__main__":
    main()
