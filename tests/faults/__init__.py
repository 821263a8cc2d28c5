"""Faults that tests/campaign.py tries on small trainings: `bench` has these, `kinds` the faults."""
