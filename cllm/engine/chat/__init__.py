"""Chats: from messages to the tokens of a prompt, and from an output to messages."""
