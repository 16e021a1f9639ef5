"""The vocabulary of the embedded model and of the tiny ones: a token per byte, and control tokens.

`<|im_end|>` ends every answer.
"""

from __future__ import annotations

import gguf

BOS, END, START, ANSWER = 256, 257, 258, 259
CONTROL_TOKENS = ("<|bos|>", "<|im_end|>", "<|im_start|>", "<|answer|>")
N_VOCAB = 256 + len(CONTROL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
