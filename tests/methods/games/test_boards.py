"""Games on boards: FrozenLake and Sokoban by their rules, winning paths of the expert, and a run of each."""

import json
import random
from itertools import product
from pathlib import Path

import pytest

import practicum
from practicum.methods.games import frozen_lake, sokoban
from practicum.methods.games.boards import LETTERS, MOVES, WORDS, BoardTask, Game
from practicum.methods.games.frozen_lake import Lake
from practicum.methods.games.sokoban import Warehouse
from practicum.ports import TaskContext
from practicum.types import Prompt, Rollout

CONTEXT = TaskContext(seed=0, base_dir=Path())
SMALL = {"train_size": 6, "heldout_size": 6}


def built(module, **settings: object) -> BoardTask:
    task = module.build(module.Config.model_validate({**SMALL, **settings}), CONTEXT)
    assert isinstance(task, BoardTask)
    return task


def test_a_lake_by_hand() -> None:
    game = Game(Lake(("SFH", "FFF", "HFG"), (0,) * 5), 5)
    assert game.board.draw((0, 0)) == "P.O\n...\nO.G"
    assert game.play(["left", "up"]) == (0, 0), "the shore holds the player back"
    assert game.play(["down", "right", "right", "down"]) == (2, 2)
    assert game.answer(["down", "right", "right", "down"]) is None, "the goal ends it"
    assert game.answer(["right", "right"]) is None and game.play(["right", "right", "left"]) == (
        0,
        2,
    )
    assert game.find_best([]) == ["down", "right"], "both begin a way of four"
    assert game.find_best(["right"]) == ["down"]
    assert set(game.find_best(["up", "up"])) == set(MOVES), "three turns do not suffice"
    assert game.answer(["up"] * 5) is None, "the turns are over"


def test_slippery_ice_goes_to_either_side() -> None:
    calm, ahead, behind = (Lake(("SF", "FG"), (drift,)) for drift in (0, 1, -1))
    assert [lake.move((0, 0), "down", 0) for lake in (calm, ahead, behind)] == [
        (1, 0),
        (0, 1),
        (0, 0),
    ], "down, or right, or left into the shore"
    task = built(frozen_lake, slippery=True, train_size=300, turns=20)
    drifts = [drift for game in task.games.values() for drift in game.board.drifts]
    assert all(0.28 < drifts.count(way) / len(drifts) < 0.39 for way in (-1, 0, 1))


def test_a_lake_moves_as_gymnasiums() -> None:
    """Recorded from gymnasium 1.4: the destination of each action from each square, to either side of it and ahead."""
    record = json.loads((Path(__file__).parent / "frozen_lake_record.json").read_text())
    for lake in record["lakes"]:
        rows, size = tuple(lake["rows"]), len(lake["rows"])
        for place, action, number in product(range(size**2), range(4), range(3)):
            square = divmod(place, size)
            if rows[square[0]][square[1]] in "HG":
                continue
            board = Lake(rows, (number - 1,))
            after = board.move(square, tuple(MOVES)[action], 0)
            assert after == divmod(lake["next"][place][action][number], size)
            assert board.is_won(after) == lake["rewards"][place][action][number]


def test_a_warehouse_by_hand() -> None:
    # #####      the box is pushed right twice; then it is in its place
    # #@$_.#
    walls, places = frozenset({(1, 0)}), frozenset({(0, 3)})
    game = Game(Warehouse(4, walls, places, ((0, 0), frozenset({(0, 1)}))), 4)
    assert game.board.draw(game.board.start).split("\n")[:3] == ["######", "#@$_.#", "##___#"]
    assert game.play(["down"]) == game.board.start, "a wall"
    assert game.play(["right"]) == ((0, 1), frozenset({(0, 2)}))
    assert game.board.is_won(game.play(["right", "right"]))
    assert game.board.draw(game.play(["right", "right"])).split("\n")[1] == "#__@*#"
    assert game.find_best([]) == ["right"] and game.find_best(["right"]) == ["right"]
    two = Warehouse(4, frozenset(), places, ((0, 0), frozenset({(0, 1), (0, 2)})))
    assert two.move(two.start, "right", 0) == two.start, "two boxes are too heavy"


def test_a_pull_is_a_push_backwards() -> None:
    draw, opposite = random.Random(0), {"left": "right", "right": "left", "up": "down"}
    opposite["down"] = "up"
    for seed in range(30):
        config = sokoban.Config(size=4, boxes=2, walls=0.2)
        warehouse = sokoban.draw_warehouse(config, random.Random(seed))
        state = warehouse.start
        for _ in range(20):
            action = draw.choice(tuple(MOVES))
            after = warehouse.pull(state, action)
            if after != state:
                assert warehouse.move(after, opposite[action], 0) == state
            state = after


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (frozen_lake, {"size": 3, "turns": 5}),
        (frozen_lake, {"size": 3, "turns": 5, "slippery": True}),
        (sokoban, {"size": 3, "turns": 5}),
    ],
)
def test_the_experts_way_is_the_shortest_of_all(module, settings: dict[str, object]) -> None:
    for game in built(module, **settings).games.values():
        ways = [
            said
            for length in range(game.turns + 1)
            for said in product(MOVES, repeat=length)
            if game.board.is_won(game.play(said))
        ]
        least = min(map(len, ways), default=None)
        assert game.can_win() == (least is not None)
        best = {said[0] for said in ways if len(said) == least} or set(MOVES)
        assert set(game.find_best([])) == best


@pytest.mark.parametrize("module", [frozen_lake, sokoban])
def test_a_task_is_seeded_and_its_expert_wins(module) -> None:
    task, same = built(module), built(module)
    assert task.opens_episodes and task.has_expert
    assert task.letters
    prompts = [*task.heldout_prompts(), *task.train_prompts()]
    assert prompts == [*same.heldout_prompts(), *same.train_prompts()] and len(prompts) == 12
    assert len({prompt.messages[0].content for prompt in prompts}) > 6
    for prompt in prompts:
        episode, said = task.open(prompt, 0), []
        seen: str | None = prompt.messages[0].content
        while seen is not None:
            assert set(seen) <= set(task.letters)
            chances = task.expert(prompt, said)
            assert sum(chances.values()) == pytest.approx(1)
            said.append(max(chances, key=chances.__getitem__))
            message = episode.step(said[-1]).message
            seen = None if message is None else message.content
        assert task.reward(Rollout.from_text(prompt, *said)) == 1
        lost = Rollout.from_text(prompt, *["nothing"] * 20)
        assert task.reward(lost) == 0


def test_an_expert_that_slips_goes_anywhere() -> None:
    game = Game(Lake(("SFH", "FFF", "HFG"), (0,) * 5), 5)
    chances = [
        BoardTask({"p": game}, 0, "", slip, "").expert(Prompt("p", ()), []) for slip in (0.2, 1)
    ]
    assert chances[0] == pytest.approx({"left": 0.05, "down": 0.45, "right": 0.45, "up": 0.05})
    assert chances[1] == pytest.approx(dict.fromkeys(MOVES, 0.25))


def test_what_names_no_direction_is_answered_with_what_to_write() -> None:
    task = built(frozen_lake, rules=False)
    prompt = task.train_prompts()[0]
    board = prompt.messages[0].content
    observation = task.open(prompt, 0).step("I am lost")
    assert observation.message is not None
    assert observation.warning == "no move: write left, down, right, up\n"
    assert observation.message.content == f"{observation.warning}{board}"
    assert task.open(prompt, 0).step("down").warning == ""
    assert WORDS.read("Not left. I go DOWN!") == "down" and WORDS.read("leftish") is None


def test_directions_may_be_letters() -> None:
    task = built(frozen_lake, letters=True, slip=0.2)
    words = built(frozen_lake, slip=0.2)
    prompt = task.train_prompts()[0]
    text = prompt.messages[0].content
    assert text.startswith(f"{frozen_lake.RULES} Write l, d, r or u.\n")
    message = task.open(prompt, 0).step("left").message
    assert message is not None and message.content.startswith("no move: write l, d, r, u\n")
    assert LETTERS.read("Go D, u") == "up" and LETTERS.read("down") is None
    expected = words.expert(words.train_prompts()[0], ["down", "lost"])
    assert task.expert(prompt, ["d", "lost"]) == {name[0]: p for name, p in expected.items()}
    assert set("ldru") <= set(task.letters) and "f" not in set(
        built(frozen_lake, rules=False, letters=True).letters
    )


def test_more_boxes_than_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="3 boxes need at least as many turns; raise turns"):
        sokoban.Config(boxes=3, turns=2)


@pytest.mark.long
def test_a_run_learns_from_the_expert(tmp_path: Path) -> None:
    result = practicum.distill(
        name="board",
        out=tmp_path,
        student={"model": {"hidden_size": 16, "layers": 1, "heads": 2}},
        teacher={"type": "expert"},
        task={"type": "frozen_lake", "size": 3, "turns": 3, "rules": False, **SMALL},
        rollout={"max_new_tokens": 60},
        train={"steps": 1, "prompts_per_step": 4, "threads": 1},
        evaluation={"prompts": 2},
    )
    assert result.summary["steps"] == 1


@pytest.mark.long
def test_a_run_learns_boards_and_no_warnings(tmp_path: Path) -> None:
    """An untrained student names no direction, so that almost all replies begin with a warning."""
    practicum.distill(
        name="board",
        out=tmp_path,
        student={"model": {"hidden_size": 16, "layers": 1, "heads": 2}},
        teacher={"type": "none"},
        task={"type": "frozen_lake", "size": 3, "turns": 3, "rules": False, **SMALL},
        rollout={"max_new_tokens": 120},
        objective={"losses": [{"signal": "text", "divergence": "ce", "source": "environment"}]},
        train={"steps": 1, "prompts_per_step": 6, "threads": 1},
        monitors={"M4": "off"},
        evaluation={"prompts": 0},
    )
    folder = tmp_path / "board"
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    counts = {
        author: sum(
            run["tokens"] for row in rows for run in row["authors"] if run["author"] == author
        )
        for author in ("environment", "harness")
    }
    texts = [turn["text"] for row in rows for turn in row["turns"] if turn["role"] == "user"]
    warnings = sum(text.startswith("no move:") for text in texts)
    assert counts["harness"] == warnings * len("no move: write left, down, right, up\n") > 0
    around = counts["environment"] - len(texts) * len("P..\n...\n..G")
    assert around == len(texts) * 2, "the template's tokens before and after a reply"
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["supervised"] == counts["environment"]
