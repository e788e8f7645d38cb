"""Measurements beside predictions, the user's own results and a team's, `plan validate`."""
