"""The event loop's side: requests in, streams of tokens out."""
