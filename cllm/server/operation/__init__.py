"""Operation: metrics, traces, logs."""
