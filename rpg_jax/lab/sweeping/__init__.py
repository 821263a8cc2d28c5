"""Sweeps: variants by seeds over one config, as many runs at once as the machine carries."""
