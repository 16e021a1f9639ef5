"""Check that forced tool calls satisfy their schemas.  `python -m tests.engine.chat.referee --n 500`.

jsonschema judges each template with many random schemas.  Every random text of the grammar must be read
as one call that the schema allows.  Every drawn set of arguments must be allowed by the grammar and
read back unchanged.  This needs no model.  With `--calls N` the embedded model also answers N chats for
each template.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio

from cllm import Engine, FinishReason, SamplingParams
from cllm.bindings import Model
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import ChatTokenizer
from cllm.engine.chat.tool_schema import ToolParameters
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.constraints.llguidance import Guidance
from tests.engine.chat.test_chat_template import TEMPLATES
from tests.engine.chat.test_output_parser import channels_of
from tests.engine.chat.tool_schemas import NAME, allowed, cases, is_writable, walk, written

N_WALKS = 2
MESSAGES = [{"role": "user", "content": "Go."}]
ASKED: dict[str, Any] = {"tool_choice": NAME}
N_CTX = 16_384
MAX_TOKENS = 400  # of an answer of the embedded model


class Referee:
    """Judges the calls of one template.

    Attributes
    ----------
    counts : Counter
        Numbers of grammars, of written argument sets, of calls drawn from a grammar, and of cut-off texts.
    faults : list of str
    """

    def __init__(self, path: Path, model: Model, guidance: Guidance) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._path, self._model, self._guidance = path, model, guidance

    def judge(self, seed: int, tried: Iterable[tuple[Any, list[dict[str, Any]]]]) -> None:
        """Try schemas, each with arguments that it allows."""
        chat = ChatTokenizer(self._model.vocab, self._path.read_text(), None)
        for i, (schema, drawn) in enumerate(tried):
            prompt = ChatPrompt.of(MESSAGES, tools=_tools(schema), **ASKED)
            # The chat is not rendered: some templates reject schemas that the grammar supports.
            self._judge_one(chat._plain._answer(prompt, ""), schema, drawn, seed * 7919 + i)
        chat.close()

    async def ask(self, seed: int, schemas: Iterable[Any]) -> None:
        """Let the embedded model answer, one chat for each schema."""
        async with (
            Engine(chat_template=self._path.read_text(), n_ctx=N_CTX) as engine,
            anyio.create_task_group() as group,
        ):
            for i, schema in enumerate(schemas):
                group.start_soon(self._ask_one, engine, schema, seed * 7919 + i)

    async def _ask_one(self, engine: Engine, schema: Any, seed: int) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=seed)
        done = await engine.chat(MESSAGES, params, tools=_tools(schema), **ASKED)
        if done.finish_reason is FinishReason.LENGTH:
            self.counts["cut off"] += 1
            return
        self.counts["called"] += 1
        calls = [call.arguments for call in done.tool_calls]
        if len(calls) != 1 or not allowed(schema, json.loads(calls[0])):
            self.faults.append(f"answered {done.text!r}, {calls}, of {json.dumps(schema)}")

    def _judge_one(self, answer: Any, schema: Any, drawn: list[dict[str, Any]], seed: int) -> None:
        said = json.dumps(schema)
        matcher = self._guidance._compile("tools", answer.grammar).start().matcher
        self.counts["grammars"] += 1
        (tool,) = answer.tools
        for arguments in drawn:
            if is_writable(answer.output_format, tool, arguments):
                self._write(answer, tool, matcher, arguments, said)
        for n in range(N_WALKS):
            text = walk(matcher, self._model, seed * N_WALKS + n)
            if text is None:
                self.counts["cut off"] += 1
                continue
            self.counts["drawn"] += 1
            _, _, calls = _read(answer, text)
            if len(calls) != 1:
                self.faults.append(f"no call: {text} of {said}")
            elif not allowed(schema, json.loads(calls[0][1])):
                self.faults.append(f"not allowed: {text}, read as {calls}, of {said}")

    def _write(
        self, answer: Any, tool: ToolParameters, matcher: Any, arguments: Any, said: str
    ) -> None:
        text = written(answer.output_format, tool, arguments)
        tokens = self._model.vocab.tokenize(text, add_special=False, parse_special=True)
        again = matcher.deep_copy()
        n = again.try_consume_tokens(tokens)
        self.counts["written"] += 1
        if n < len(tokens) or not again.is_accepting():
            taken = self._model.vocab.join(tokens[:n]).decode("utf-8", "replace")
            self.faults.append(f"cannot be written: {text}, but {taken}, of {said}")
        _, _, calls = _read(answer, text)
        if [json.loads(one) for _, one in calls] != [arguments]:
            self.faults.append(f"read as {calls}: {text} of {said}")


def _tools(schema: Any) -> list[dict[str, Any]]:
    function = {"name": NAME, "description": "Books it.", "parameters": schema}
    return [{"type": "function", "function": function}]


def _read(answer: Any, text: str) -> Any:
    """Return what the parser reads from a call, behind a thought if every output begins with one."""
    begin, end = answer.output_format.reasoning or ("", "")
    return channels_of(answer.parser("x"), [text if begin else end + text])


def main() -> int:
    """Judge all templates, and print the counts and faults; 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=500, help="schemas for each template")
    parser.add_argument("--calls", type=int, default=0, help="answers for each template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*", help="parts of the names of templates")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    faults: list[str] = []
    with Model(EMBEDDED_MODEL, vocab_only=True) as model:
        guidance = Guidance(model.vocab, 1)
        for path in TEMPLATES:
            if options.names and not any(name in path.stem for name in options.names):
                continue
            started, referee = time.perf_counter(), Referee(path, model, guidance)
            referee.judge(options.seed, cases(options.seed, options.n))
            if options.calls:
                schemas = [schema for schema, _ in cases(options.seed + 1, options.calls)]
                anyio.run(referee.ask, options.seed, schemas)
            total += referee.counts
            faults += referee.faults
            seconds = time.perf_counter() - started
            print(
                f"{path.stem}: {dict(referee.counts)}, {len(referee.faults)} faults, {seconds:.0f} s"
            )
            print(*referee.faults[:3], sep="\n", end="\n" if referee.faults else "", flush=True)
    print(f"{dict(total)}, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
