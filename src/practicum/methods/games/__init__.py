"""Games on boards, for methods with agents: Frozen Lake and Sokoban."""

PARTS = {"tasks": ["frozen_lake", "sokoban"]}
