"""llama.cpp behind the protocols of the engine; the only package that opens models and contexts."""
