"""Compare cllm with its alternatives, by turns in one run.

llama.cpp's own programs have the commit, compiler and flags of the library that cllm loads, but unchanged source.
"""
