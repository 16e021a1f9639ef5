"""Choose one of several servers for a request.  Pure."""
