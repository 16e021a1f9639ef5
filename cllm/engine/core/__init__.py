"""The engine without threads, event loop and libllama: its requests, batches, KV cache and results."""
