"""Which of several servers a request goes to.  Pure."""
