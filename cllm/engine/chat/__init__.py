"""From messages to the tokens of a prompt, by a chat template."""
