"""From a config to a run. `build` makes the parts and `states` the state; `train`, `evaluate`, `prepare` and `convert`
do the work of the commands; `cli` wraps commands, `job` joins processes, `summary` says how a run ended.
"""
