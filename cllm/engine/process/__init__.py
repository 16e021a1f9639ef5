"""The inference thread in a process of its own: encoding of messages, parent, child, and crashes."""
