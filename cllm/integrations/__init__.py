"""An engine of this process as other libraries want one: each module needs the extra of its name."""
