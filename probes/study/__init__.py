"""Optuna: the study, the sampler, the certificate."""
