"""The simulated and the measured rung: what runs the real trainer. Needs the training stack; `planner` does not."""
