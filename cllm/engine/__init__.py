"""The engine: from requests to streams of text."""
