"""What stands around the application: limits, connections, bodies as JSON, errors as answers."""
