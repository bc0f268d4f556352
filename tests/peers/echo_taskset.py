"""A taskset for the tests: write something that begins with an a; its harness asks a second time."""

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harnesses.null.harness import NullHarnessConfig

__all__ = ["AskTwice", "Echo"]


class EchoTask(vf.Task):
    """One question."""

    @vf.reward
    async def begins(self, trace: Any) -> float:
        """Return 1 for a last answer that begins with an a."""
        return float((trace.assistant_messages[-1].content or "").startswith("a"))


class Echo(vf.Taskset[EchoTask, vf.TasksetConfig]):
    """Four questions."""

    def load(self):  # type: ignore[no-untyped-def]
        """Yield the questions."""
        for number, prompt in enumerate(("abc", "cab", "dd", "ba")):
            yield EchoTask(vf.TaskData(idx=number, prompt=prompt), self.config.task)


class AskTwice(vf.Harness[NullHarnessConfig]):
    """Asks, repeats the answer, and asks again."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # type: ignore[no-untyped-def]
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ):
        """Chat for two turns."""
        import openai
        from verifiers.v1.runtimes import ProgramResult

        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages
                )
                said = completion.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "dc"},
                ]
        return ProgramResult(exit_code=0, stdout="", stderr="")
