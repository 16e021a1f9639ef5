"""From requests to streams of text."""
