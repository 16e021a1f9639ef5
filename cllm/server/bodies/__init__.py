"""The bodies of requests: their fields, their types, and what clients of other servers write."""
