"""Output formats that rendering a template does not show; texts in its source identify them.  Pure."""

from __future__ import annotations

from dataclasses import replace

from cllm.engine.chat.call_literals import ElementCalls, GemmaCalls, PythonCalls
from cllm.engine.chat.call_syntax import JsonCalls, NamedCalls, TaggedCalls
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.routed_turn import HARMONY, RoutedTurn

# Syntax of calls that a prompt asks for if the template does not write tools.
DEFAULT_CALLS = JsonCalls(("<tool_call>",), ("</tool_call>",))

THINK = ("<think>", "</think>")


def _dsml(space: str, section: str) -> TaggedCalls:
    mark = f"｜DSML｜{space}"
    return TaggedCalls(
        section_start=f"<{mark}{section}>",
        section_end=f"</{mark}{section}>",
        call_start=f'<{mark}invoke name="',
        name_end='"',
        header_end=">",
        key_start=f'<{mark}parameter name="',
        key_end='" string="',
        value_start='">',
        attribute=(("true", True), ("false", False)),
        value_end=f"</{mark}parameter>",
        call_ends=(f"</{mark}invoke>",),
    )


NAMED: dict[str, OutputFormat] = {
    "harmony": OutputFormat(turn=HARMONY),
    "muse": OutputFormat(
        turn=RoutedTurn(
            start="<|start|>assistant",
            message="<|message|>",
            ends=("<|eom|>", "<|eot|>"),
            reasoning_route=r"^ ?to=self$",
            content_route=r"^ ?to=user$|^$",
            call_route=r"^ ?to=(?!self$|user$)(?P<own>)(?P<name>\S+)$",
            calls=TaggedCalls(
                section_start="<atem:function_calls>",
                section_end="</atem:function_calls>",
                call_start='<atem:invoke name="',
                name_end='">',
                key_start='<atem:parameter name="',
                key_end='">',
                value_end="</atem:parameter>",
                call_ends=("</atem:invoke>",),
            ),
            call_written=" to={name}<|message|>",
            thought_written=(" to=self<|message|>", "<|eom|><|start|>assistant"),
            answer_written=" to=user<|message|>",
            others_written=(" to=self<|message|>",),
            between="<|eom|><|start|>assistant",
            markers=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        )
    ),
    "functionary-v3.2": OutputFormat(
        turn=RoutedTurn(
            start=">>>",
            message="\n",
            ends=(">>>",),
            reasoning_route="(?!)",
            content_route="^all$",
            call_route=r"^(?!all$)(?P<name>\S+)$",
            call_written="{name}\n",
            answer_written="all\n",
            between=">>>",  # with strict tools, an answer cannot contain this text
        )
    ),
    "kimi-k2": OutputFormat(
        calls=NamedCalls(
            section_start="<|tool_calls_section_begin|>",
            section_end="<|tool_calls_section_end|>",
            call_start="<|tool_call_begin|>",
            separators=("<|tool_call_argument_begin|>",),
            call_ends=("<|tool_call_end|>",),
            name=r"\s*(?P<id>(?:functions\.)?(?P<name>.+?)(?::\d+)?)\s*",
            name_written="functions.{name}:0",
        ),
    ),
    "kimi-k3": OutputFormat(
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        calls=TaggedCalls(
            section_start="<|open|>tools<|sep|>",
            section_end="<|close|>tools<|sep|>",
            call_start='<|open|>call tool="',
            name_end='"',
            header_end="<|sep|>",
            key_start='<|open|>argument key="',
            key_end='" type="',
            value_start='"<|sep|>',
            attribute=(
                ("string", True),
                ("number", False),
                ("boolean", False),
                ("object", False),
                ("array", False),
                ("null", False),
                ("integer", False),
            ),
            value_end="<|close|>argument<|sep|>",
            call_ends=("<|close|>call<|sep|>",),
            unescapes=True,
        ),
        reasoning_stops=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
        dropped=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
    ),
    "minimax-m3": OutputFormat(reasoning=("<mm:think>", "</mm:think>"), calls=ElementCalls()),
    "gemma-4": OutputFormat(
        reasoning=("<|channel>thought", "<channel|>"),
        calls=GemmaCalls(),
        dropped=("<|tool_response>", "<turn|>"),
    ),
    "lfm2": OutputFormat(
        calls=PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_bare=True)
    ),
    "llama-4": OutputFormat(
        calls=PythonCalls(("<|python_start|>",), ("<|python_end|>",), is_bare=True)
    ),
    "llama-3": OutputFormat(
        calls=JsonCalls(
            ("<|python_tag|>",), ("<|eom_id|>",), is_bare=True, arguments_key="parameters"
        )
    ),
    "deepseek-v3": OutputFormat(
        calls=NamedCalls(
            section_start="<｜tool▁calls▁begin｜>",
            section_end="<｜tool▁calls▁end｜>",
            call_start="<｜tool▁call▁begin｜>",
            separators=("```json",),
            call_ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
            name=r"\s*(?:function)?\s*<｜tool▁sep｜>(?P<name>.*?)\s*",
            name_written="function<｜tool▁sep｜>{name}\n",
        ),
    ),
    "deepseek-v4.1": OutputFormat(reasoning=THINK, calls=_dsml(" ", "calls")),
    "deepseek-v4": OutputFormat(reasoning=THINK, calls=_dsml("", "tool_calls")),
    "deepseek-v3.2": OutputFormat(reasoning=THINK, calls=_dsml("", "function_calls")),
    "granite-3.3": OutputFormat(
        reasoning=THINK,
        calls=JsonCalls(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
        dropped=("<response>", "</response>"),
    ),
    "command-r-plus": OutputFormat(
        calls=JsonCalls(
            ("Action:```json", "Action: ```json", "Action:\n```json"),
            ("```",),
            is_list=True,
            name_key="tool_name",
            arguments_key="parameters",
        )
    ),
    "command-r7b": OutputFormat(
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
        calls=JsonCalls(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            is_list=True,
            name_key="tool_name",
            arguments_key="parameters",
        ),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "gigachat-3": OutputFormat(
        calls=JsonCalls(("<|message_sep|>\n\nfunction call<|role_sep|>",)),
        dropped=("<|message_sep|>",),
    ),
    "firefunction": OutputFormat(calls=JsonCalls(("functools",), is_list=True)),
}

# The first entry with all texts in the source names the format; "" means that there is no name.
KNOWN_BY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("muse", ("<atem:function_calls>", "<|eom|>")),
    ("functionary-v3.2", (">>>all", ">>>${recipient}")),
    ("kimi-k2", ("<|tool_calls_section_begin|>",)),
    ("kimi-k3", ("<|open|>", "<|close|>", "<|end_of_msg|>")),
    ("minimax-m3", ("]<]minimax[>[", "<invoke name=")),
    ("gemma-4", ("<|tool_call>call:",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [",)),
    ("llama-4", ("<|python_start|>",)),
    ("deepseek-v4.1", ("DSML", "｜ calls")),
    ("deepseek-v3.2", ("DSML", "function_calls")),
    ("deepseek-v4", ("DSML", "tool_calls")),
    ("deepseek-v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("granite-3.3", ("<|tool_call|>", "Granite")),
    ("command-r7b", ("<|START_ACTION|>", "<|END_ACTION|>")),
    ("gigachat-3", ("function call<|role_sep|>",)),
    ("command-r-plus", ("<|CHATBOT_TOKEN|>", "Action:", "```json")),
    ("firefunction", ("functools",)),
    ("", ("<function=", "<|python_tag|>")),
    ("llama-3", ("<|start_header_id|>ipython",)),
    ("llama-3", ("<|python_tag|>", '"parameters": ')),
)


def named_format(source: str) -> OutputFormat | None:
    """Return the named format that texts in a template's source identify; None if there is none."""
    for name, texts in KNOWN_BY:
        if all(text in source for text in texts):
            return replace(NAMED[name], name=name) if name else None
    return None
