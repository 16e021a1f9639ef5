"""Adapters that offer an engine of this process to other libraries; each module names the extra it needs."""
