"""The vocabulary of the embedded model and of the tiny ones: a token per byte, and control tokens.

`<|im_end|>` ends every answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import gguf

BOS, END, START, ANSWER = 256, 257, 258, 259
CONTROL_TOKENS = ("<|bos|>", "<|im_end|>", "<|im_start|>", "<|answer|>")
N_VOCAB = 256 + len(CONTROL_TOKENS)
# ChatML.  Each tool is one line, `name(key:str,other?:num,choice:a|b)`, because the model's context has only
# 2,048 bytes.  The text of a turn stays the same in later prompts, so that they share a prefix.
CHAT_TEMPLATE = """\
{%- macro shape(p) -%}
    {%- if p.enum is defined -%}{{ p.enum | join('|') }}
    {%- elif p.type == 'object' -%}{{ '{' + members(p) + '}' }}
    {%- elif p.type == 'array' -%}{{ '[' + shape(p['items'] or {}) + ']' }}
    {%- elif p.type in ('integer', 'number') -%}num
    {%- elif p.type == 'boolean' -%}bool
    {%- else -%}str
    {%- endif -%}
{%- endmacro -%}
{%- macro members(p) -%}
    {%- for name, inner in (p.properties or {}) | items -%}
        {{ name }}{{ '' if name in (p.required or []) else '?' }}:{{ shape(inner) }}{{ '' if loop.last else ',' }}
    {%- endfor -%}
{%- endmacro -%}
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools or has_system -%}
    {{- '<|im_start|>system\n' -}}
    {%- if has_system -%}{{- messages[0].content + ('\n' if tools else '') -}}{%- endif -%}
    {%- if tools -%}
        {{- 'tools:\n' -}}
        {%- for tool in tools -%}
            {{- tool.function.name + '(' + members(tool.function.parameters or {}) + ')\n' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (loop.first and has_system) -%}
        {{- '<|im_start|>' + message.role + '\n' -}}
        {%- if message.role == 'assistant' and message.reasoning_content -%}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
        {%- endif -%}
        {{- message.content or '' -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\n' if message.content or not loop.first else '' -}}
            {{- '<tool_call>\n{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
            {{- call.function.arguments | tojson + '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking -%}{{- '<think>\n' -}}{%- endif -%}
{%- endif -%}
"""


def byte_pieces() -> list[str]:
    """GPT-2's printable stand-in for each byte, the alphabet of byte-level BPE vocabularies."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def add_vocabulary(writer: gguf.GGUFWriter, more_tokens: Sequence[str] = ()) -> None:
    """Write the tokens, their types and roles, and more control tokens; the caller adds the chat template."""
    control_tokens = (*CONTROL_TOKENS, *more_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_pieces(), *control_tokens])
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(control_tokens)
    )
    # llama.cpp requires merges, and gguf drops an empty list.  This merge never applies, because no
    # other merge produces its left half, a control token, from bytes.
    writer.add_token_merges([f"{CONTROL_TOKENS[0]} {CONTROL_TOKENS[1]}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_add_bos_token(True)
