"""The JSON documents of `plan`, as msgspec types: what `--json` prints, and the JSON Schema of `plan schema`.

A key that a document does not always have is `UNSET` where it is left out. Memory is in bytes, time in seconds.
Additions are allowed; a change of meaning raises `SCHEMA`.
"""
