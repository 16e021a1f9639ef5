"""HTTP around the application: limits, connections, bodies as JSON, errors."""
