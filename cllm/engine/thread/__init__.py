"""The inference thread, and the queues between it and the event loop."""
