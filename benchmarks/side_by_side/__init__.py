"""Compare cllm with its alternatives, by turns in one run; llama.cpp's own programs load the same library."""
