"""Bytes of one number in each dtype."""

FLOAT64_BYTES = 8
FLOAT32_BYTES = 4
INT32_BYTES = 4
INT64_BYTES = 8
SIXTEEN_BIT_BYTES = 2  # bfloat16 and float16
DTYPE_BYTES: dict[str, int] = {
    "float32": FLOAT32_BYTES, "bfloat16": SIXTEEN_BIT_BYTES, "float16": SIXTEEN_BIT_BYTES, "uint8": 1,
}  # fmt: skip
