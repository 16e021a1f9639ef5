"""The inference thread in a process of its own: what crosses the border, both sides, and crashes."""
