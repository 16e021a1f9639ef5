"""Chats: messages to the tokens of a prompt, and an output to reasoning, content and calls."""
