"""Memory, collectives and roofline time of a config on hardware that is not here."""
