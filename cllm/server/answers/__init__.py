"""Answers with text: chats, tools, shapes of answers."""
