"""Structured output: grammars, JSON schemas and regular expressions."""
