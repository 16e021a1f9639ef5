"""How a request for text is answered: chats, tools, shapes of answers."""
