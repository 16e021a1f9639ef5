"""Compare cllm with its alternatives, by turns in one run; all but xllamacpp load the same library."""
