"""Faults that tests/campaign.py tries on small trainings: `bench` has these, other modules the faults."""
