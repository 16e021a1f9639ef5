"""Check of the chat template: the parts of a conversation that it supports, found by rendering."""

from __future__ import annotations

from cllm.bindings import Model
from cllm.doctor.findings import Check, Status
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import ChatTokenizer
from cllm.engine.chat.template_abilities import TemplateAbilities
from cllm.errors import CllmError

NAME = "chat template"
# Abilities by name.  Without one, the engine writes that part of a conversation as plain text.
IN_WORDS = {
    "system": "system messages",
    "tools": "tools",
    "tool_calls": "calls",
    "tool_results": "results of calls",
}


def check_chat_template(model: Model) -> Check:
    """Check that the template renders a chat, and report its abilities; otherwise return a warning."""
    template = model.chat_template()
    if template is None:
        return Check(NAME, Status.WARNING, "none: chats need one, prompts do not")
    chat = ChatTokenizer(model.vocab, template, model.chat_template("tool_use"))
    try:
        chat.render(ChatPrompt.of([{"role": "user", "content": "Hello"}]))
        found = described(chat.abilities)
    except CllmError as error:
        return Check(NAME, Status.WARNING, f"chats fail: {' '.join(str(error).split())}")
    finally:
        chat.close()
    return Check(NAME, Status.OK, f"{len(template):,} characters; {found}")


def described(abilities: TemplateAbilities) -> str:
    """Return what a template supports, and what is written as text instead."""
    takes = [name for key, name in IN_WORDS.items() if getattr(abilities, key)]
    if abilities.parallel_tool_calls:
        takes.append("several calls in one turn")
    if abilities.thinking:
        takes.append("thinking" + (" (can be switched)" if abilities.thinking_switch else ""))
    if abilities.reasoning_effort:
        takes.append("reasoning_effort")
    in_words = [name for key, name in IN_WORDS.items() if not getattr(abilities, key)]
    told = f"takes {', '.join(takes)}" if takes else "takes questions and answers"
    return told + (f"; told in words: {', '.join(in_words)}" if in_words else "")
