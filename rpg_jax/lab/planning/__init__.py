"""What a config takes on hardware that is not here: memory, collectives, a roofline."""
