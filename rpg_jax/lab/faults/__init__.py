"""A campaign of faults: small trainings that are killed, stopped, starved and lied to, and what becomes of each.

`command` spends the budget, `processes` starts and watches trainings, `bench` knows how they should have ended, and the
other modules hold the faults, one function a kind.
"""
