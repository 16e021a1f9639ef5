"""cllm beside what a user would pick instead, on the same library, by turns in one run."""
