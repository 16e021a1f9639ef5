"""What an operator is told: metrics, traces, logs."""
