"""Sampling: from rows of logits to tokens and log probabilities."""
