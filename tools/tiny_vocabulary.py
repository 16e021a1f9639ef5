"""The vocabulary of the embedded model and of the tiny ones: a token per byte, and control tokens.

`<|im_end|>` ends every answer.
"""

from __future__ import annotations

import gguf

BOS, END, START, ANSWER = 256, 257, 258, 259
CONTROL_TOKENS = ("<|bos|>", "<|im_end|>", "<|im_start|>", "<|answer|>")
N_VOCAB = 256 + len(CONTROL_TOKENS)
# ChatML.  Tools are shown as `name(key:str,other?:num,choice:a|b)`, a line each: 2,048 bytes are all the
# context that the model has.  What it says of a turn is the beginning of the next prompt.
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


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Write the tokens and what they are for; the chat template is left to the caller."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_pieces(), *CONTROL_TOKENS])
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    )
    # llama.cpp insists on merges and gguf drops an empty list.  This one never applies: no merge
    # makes its left half out of bytes.
    writer.add_token_merges([f"{CONTROL_TOKENS[0]} {CONTROL_TOKENS[1]}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_add_bos_token(True)
