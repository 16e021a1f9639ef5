"""Models by name: `hf:user/repo[:quant]`, downloaded once, found without a network from then on."""
