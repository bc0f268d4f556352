"""A user of the task `served`: uses the chat protocol with a run while it learns."""

import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from toy import TASK, toy_run


class Client:
    """A user with the chat protocol."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port = port
        self.host = host

    def post(self, data: Any, path: str = "/v1/chat/completions", **headers: str) -> Any:
        end = time.monotonic() + 120
        while True:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
            try:
                connection.request("POST", path, json.dumps(data), headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except ConnectionError:
                # The run is still loading its models.
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
            finally:
                connection.close()

    def converse(self, *texts: str, **settings: Any) -> list[str]:
        messages: list[dict[str, str]] = []
        for text in texts:
            messages.append({"role": "user", "content": text})
            status, body = self.post({"model": "student", "messages": messages, **settings})
            assert status == 200, body
            reply = json.loads(body)["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply})
        return [message["content"] for message in messages if message["role"] == "assistant"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def served(port: int = 8000, **changes: Any) -> dict[str, Any]:
    return {
        "task": {"type": "served", "task": TASK, "port": port, "seconds": 20},
        "rollout": {"source": "served", "max_new_tokens": 4},
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "self", "weights": "live"},
            "reference": "{next}",
        },
        "notes": {"next": {"type": "next_state"}},
        "train.steps": 2,
        "train.prompts_per_step": 2,
        "train.checkpoint_every": 1,
        "evaluation": {"prompts": 2},
        **changes,
    }


def talk(models: Path, out: Path, changes: dict[str, Any], *texts: str) -> Path:
    """Run the toy recipe while a user sends these messages in turn; return its folder."""
    user = threading.Thread(target=Client(changes["task"]["port"]).converse, args=texts)
    user.start()
    folder = toy_run(models, out, changes).folder
    user.join(20)
    return folder
