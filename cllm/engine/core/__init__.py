"""The engine without threads, event loop and libllama: who runs, what a tick decodes, what becomes of it."""
