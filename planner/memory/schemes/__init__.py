"""Schemes: what each way to distribute a model holds on one GPU. One contract, one file each."""
